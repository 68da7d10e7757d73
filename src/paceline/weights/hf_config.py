"""config.json of a Hugging Face folder, as the metadata that a GGUF file of the same model has.

Every setting is translated, known to change nothing here, or refused by name. What a file leaves out means
what transformers means by leaving it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ModelFileError, UnsupportedModelError, suggest
from paceline.weights import hf_rope
from paceline.weights.hf_files import DOWNLOAD

Settings = Mapping[str, Any]

_SIZES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}

_READ = {
    *_SIZES, *_EXPERTS, "num_local_experts", "norm_topk_prob", "head_dim", "rms_norm_eps", "model_type",
    "tie_word_embeddings", "sliding_window", "use_sliding_window", "layer_types", "sliding_window_pattern",
    "_sliding_window_pattern", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "quantization_config", *hf_rope.READ,
}  # fmt: skip

_HARMLESS = {
    # Where the folder came from, and how it is read or trained.
    "_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype",
    "initializer_range", "use_cache", "cache_implementation", "attn_implementation", "_attn_implementation",
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "pretraining_tp",
    "router_aux_loss_coef", "output_router_logits", "gradient_checkpointing", "is_llama_config",
    "rope_interleaved", "unsloth_fixed", "unsloth_version", "model_name", "finetuning_task", "problem_type",
    "output_attentions", "output_hidden_states", "return_dict", "torchscript", "chunk_size_feed_forward",
    "id2label", "label2id", "use_bfloat16", "task_specific_params", "tokenizer_class", "prefix",
    # The tokenizer's own files say these.
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    # Biases are there or not; a tensor that nothing asks for is refused.
    "attention_bias", "mlp_bias", "qkv_bias",
    # Counts only while sliding windows are on, and then the layers are listed.
    "max_window_layers",
    # Heads that draft are no part of the model.
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
}  # fmt: skip

_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "use_bidirectional_attention": (None, False),
    "is_decoder": (None, False, True),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "tie_encoder_decoder": (None, False),
    "pruned_heads": (None, {}),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": (None, []),
    "use_qk_norm": (True,),
}
"""Settings that may only have these values: with another one the mathematics would be another."""


def _every_layer(settings: Settings) -> dict[str, Any]:
    """A window, if any, holds for all layers."""
    if settings.get("sliding_window") is None:
        return {}
    return {"attention.sliding_window": _size(settings, "sliding_window")}


def _no_window(settings: Settings) -> dict[str, Any]:
    """A window may be given, but stays off unless it is asked for."""
    if settings.get("use_sliding_window") or "sliding_attention" in (_layer_types(settings) or []):
        raise UnsupportedModelError(
            "config.json switches sliding windows on for some layers", "that does not run for this family yet"
        )
    return {}


def _alternating(settings: Settings) -> dict[str, Any]:
    """Gemma: every n-th layer sees everything, the others a window."""
    layers, period = _size(settings, "num_hidden_layers"), _period(settings)
    kinds = _layer_types(settings)
    wanted = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    if kinds is not None and kinds != wanted:
        raise UnsupportedModelError(
            f"config.json's layer_types do not make every {period}th layer full",
            "other patterns do not run here yet",
        )
    return {
        "attention.sliding_window": _size({"sliding_window": 4096, **settings}, "sliding_window"),
        "attention.sliding_window_pattern": period,
    }


def _period(settings: Settings) -> int:
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        if settings.get(name) is not None:
            return _size(settings, name)
    kinds = _layer_types(settings) or []
    return kinds.index("full_attention") + 1 if "full_attention" in kinds else 6


def _layer_types(settings: Settings) -> list[Any] | None:
    kinds = settings.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ModelFileError(f"config.json has layer_types = {str(kinds)[:60]}, not a list", DOWNLOAD)
    return kinds


@dataclass(frozen=True)
class Family:
    """How one `model_type` differs from Llama's configuration.

    Attributes:
        architecture: GGUF's name for it.
        tied: whether the head is the embedding where the file does not say.
        defaults: what transformers assumes for settings that are left out.
        only: see `_ONLY`.
        windows: reads what sliding windows there are.
        permuted: whether GGUF stores query and key rows in pairs for interleaved rope.
        plus_one: whether norms are stored as their distance from one.
    """

    architecture: str
    tied: bool = False
    defaults: Settings = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    windows: Callable[[Settings], dict[str, Any]] = _no_window
    permuted: bool = False
    plus_one: bool = False


FAMILIES = {
    "llama": Family("llama", permuted=True),
    "mistral": Family(
        "llama",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        windows=_every_layer,
        permuted=True,
    ),
    "qwen2": Family("qwen2", defaults={"num_key_value_heads": 32}),
    "mimo": Family("qwen2", defaults={"num_key_value_heads": 32}),
    "qwen3": Family("qwen3", defaults={"head_dim": 128, "num_key_value_heads": 32}),
    "qwen3_moe": Family("qwen3moe", defaults={"num_key_value_heads": 4, "norm_topk_prob": False}),
    "gemma3_text": Family(
        "gemma3",
        tied=True,
        defaults={"head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256},
        only={"hidden_activation": ("gelu_pytorch_tanh",), "hidden_act": ("gelu_pytorch_tanh",)},
        windows=_alternating,
        plus_one=True,
    ),
    "phi3": Family("phi3", defaults={"rms_norm_eps": 1e-5}, windows=_every_layer),
}
"""By `model_type`."""


def family(settings: Settings) -> Family:
    """The row of `FAMILIES` for a config.json; raises UnsupportedModelError where there is none."""
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type {kind!r} does not run here", suggest(str(kind), list(FAMILIES))
        )
    return FAMILIES[kind]


def tied(settings: Settings) -> bool:
    """Whether the output head is the embedding."""
    return bool(settings.get("tie_word_embeddings", family(settings).tied))


def translate(settings: Settings) -> dict[str, Any]:
    """The metadata of config.json.

    Raises:
        ModelFileError: a setting is missing or makes no sense.
        UnsupportedModelError: an unknown family, or a setting that would change the mathematics.
    """
    ours = family(settings)
    _refuse_quantised(settings)
    _refuse_unknown(settings, ours)
    settings, head = _complete(settings, ours), head_dim(settings)
    values: dict[str, Any] = {theirs: _size(settings, name) for name, theirs in _SIZES.items()}
    values["attention.layer_norm_rms_epsilon"] = hf_rope.positive(settings, "rms_norm_eps", 1e-6)
    values["attention.key_length"] = values["attention.value_length"] = head
    values |= ours.windows(settings) | hf_rope.translate(settings, head) | _scales(settings, head)
    if ours.architecture.endswith("moe"):
        values |= {theirs: _size(settings, name) for name, theirs in _EXPERTS.items()}
        values["expert_weights_norm"] = bool(settings["norm_topk_prob"])
    named = {f"{ours.architecture}.{name}": value for name, value in values.items()}
    return {"general.architecture": ours.architecture, **named}


def head_dim(settings: Settings) -> int:
    """Dimensions of an attention head."""
    settings = {**family(settings).defaults, **settings}
    if settings.get("head_dim") is not None:
        return _size(settings, "head_dim")
    width, heads = _size(settings, "hidden_size"), _size(settings, "num_attention_heads")
    if width % heads:
        raise ModelFileError(f"config.json has {heads} heads for a width of {width}", DOWNLOAD)
    return width // heads


def _complete(settings: Settings, ours: Family) -> dict[str, Any]:
    """The settings with what transformers would assume, and one name for each."""
    found = {**ours.defaults, **settings}
    if "num_local_experts" in found:
        found.setdefault("num_experts", found.pop("num_local_experts"))
    if found.get("num_key_value_heads") is None:
        found["num_key_value_heads"] = found.get("num_attention_heads")
    return found


def _scales(settings: Settings, head: int) -> dict[str, Any]:
    """Softcaps, and a scale of attention scores other than the customary one."""
    found = {}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if settings.get(name) is not None:
            found[name] = hf_rope.positive(settings, name)
    if settings.get("query_pre_attn_scalar", head) != head:
        found["attention.scale"] = 1.0 / math.sqrt(hf_rope.positive(settings, "query_pre_attn_scalar"))
    return found


def _refuse_quantised(settings: Settings) -> None:
    method = settings.get("quantization_config")
    if method is not None:
        name = method.get("quant_method") if isinstance(method, Mapping) else method
        raise UnsupportedModelError(
            f"the weights are quantised by {name!r}",
            "take the folder of the unquantised model, with --quantize q4 or q8, or a GGUF file",
        )


def _refuse_unknown(settings: Settings, ours: Family) -> None:
    only = {**_ONLY, **ours.only}
    for name, value in settings.items():
        if name in only and value in only[name]:
            continue
        if name in only or name not in _READ | _HARMLESS:
            raise UnsupportedModelError(
                f"config.json sets {name} = {str(value)[:60]}, which is not known here",
                "running the model without would change its text; update Paceline or use another conversion",
            )


def _size(settings: Settings, name: str) -> int:
    value = settings.get(name)
    if type(value) is not int or not 1 <= value <= 2**31 - 1:
        raise ModelFileError(
            f"config.json has {name} = {str(value)[:60]}, not a positive whole number",
            DOWNLOAD,
        )
    return value
