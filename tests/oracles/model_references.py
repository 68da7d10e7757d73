"""The same models in transformers: float32, from a GGUF file's own dequantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core import Floats
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import dequantize

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_KINDS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3moe": "Qwen3Moe",
    "phi3": "Phi3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Scaling parameters that bend the frequencies of tiny models within tiny contexts."""


class TransformersModel:
    """A GGUF decoder run by transformers.

    Args:
        rope: scaling parameters as transformers spells them; None means what the file's metadata says.
    """

    def __init__(self, path: Path, rope: dict[str, Any] | None = None) -> None:
        import torch

        with GGUFFile.open(path) as file:
            kind = _kind(file)
            config = _config(kind, file, rope)
            weights = {
                name: torch.from_numpy(values) for name, values in _weights(kind, file, config).items()
            }
        self.model = _transformers(f"{_KINDS[kind]}ForCausalLM")(config).to(torch.float32).eval()
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        assert set(missing) - tied == set()
        assert not unexpected

    def logits(self, tokens: Sequence[int]) -> Floats:
        """Logits [n, vocab] of every position."""
        import torch

        with torch.inference_mode():
            out: Floats = self.model(torch.tensor([list(tokens)])).logits[0].numpy()
        return out

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        import torch

        with torch.inference_mode():
            ids = self.model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [int(i) for i in ids[0, len(prompt) :]]


def llama_3_factors(head_dim: int, base: float) -> tuple[float, ...]:
    """What a converter writes to rope_freqs.weight for `LLAMA_3`, as transformers defines it."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=2048, rope_parameters={"rope_theta": base, **LLAMA_3}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = base ** (-np.arange(0, head_dim, 2) / head_dim)
    return tuple(float(f) for f in plain / scaled.numpy())


def _transformers(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def _kind(file: GGUFFile) -> str:
    """The key of `_KINDS`; Mistral's files say llama."""
    name = str(file.metadata["general.architecture"])
    return "mistral" if name == "llama" and "llama.attention.sliding_window" in file.metadata else name


def _config(kind: str, file: GGUFFile, rope: dict[str, Any] | None) -> Any:
    key = _keys(file)
    heads, layers = key("attention.head_count"), key("block_count")
    head_dim = key("attention.key_length", key("embedding_length") // heads)
    window = key("attention.sliding_window")
    types = {"gemma2": 2, "gemma3": 6}
    own: dict[str, Any] = {}
    if kind in types:
        full = [(i + 1) % types[kind] == 0 for i in range(layers)]
        own = {
            "layer_types": ["full_attention" if f else "sliding_attention" for f in full],
            "query_pre_attn_scalar": head_dim,
            "attn_logit_softcapping": key("attn_logit_softcapping"),
            "final_logit_softcapping": key("final_logit_softcapping"),
        }
    if kind in types or kind in ("mistral", "phi3"):
        own["sliding_window"] = window
    if kind == "phi3":
        original = key("rope.scaling.original_context_length", key("context_length"))
        own["original_max_position_embeddings"] = original
    if kind == "qwen3moe":
        own |= {
            "num_experts": key("expert_count"),
            "num_experts_per_tok": key("expert_used_count"),
            "moe_intermediate_size": key("feed_forward_length"),
            "norm_topk_prob": key("expert_weights_norm", True),
        }
    dynamic = key("rope.scaling.type") == "dynamic"
    return _transformers(f"{_KINDS[kind]}{'Text' if kind == 'gemma3' else ''}Config")(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=key("rope.scaling.original_context_length" if dynamic else "context_length"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope(kind, file, head_dim, rope),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_output.bias" in file.tensors,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
        **own,
    )


def _keys(file: GGUFFile) -> Any:
    def key(name: str, default: Any = None) -> Any:
        return file.metadata.get(f"{file.metadata['general.architecture']}.{name}", default)

    return key


def _rope(kind: str, file: GGUFFile, head_dim: int, given: dict[str, Any] | None) -> dict[str, Any]:
    key = _keys(file)
    found: dict[str, Any] = {"rope_type": key("rope.scaling.type", "default")}
    if "rope_factors_long.weight" in file.tensors:
        short, long = (_floats(file, f"rope_factors_{name}.weight").tolist() for name in ("short", "long"))
        found = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    found |= {
        ours: key(f"rope.scaling.{name}") for name, ours in names.items() if key(f"rope.scaling.{name}")
    }
    if (magnitude := key("rope.scaling.attn_factor")) is not None:
        own = 1 + 0.1 * np.log(found["factor"]) if found["rope_type"] == "yarn" else 1.0
        found["attention_factor"] = float(own * magnitude)
    rope = {"rope_theta": key("rope.freq_base", 10000.0), **(given or found)}
    if (turning := key("rope.dimension_count", head_dim)) != head_dim:
        rope["partial_rotary_factor"] = turning / head_dim
    if kind != "gemma3":
        return rope
    local = {"rope_type": "default", "rope_theta": 10000.0}
    return {"full_attention": rope, "sliding_attention": local}


def _weights(kind: str, file: GGUFFile, config: Any) -> dict[str, Floats]:
    """What transformers calls the tensors, in its layout."""
    gemma, out = kind.startswith("gemma"), {}
    names = {**_NAMES, **(_GEMMA_NAMES if gemma else {})}
    if kind == "phi3":
        names["ffn_up"] = "mlp.gate_up_proj"
    for name in file.tensors:
        *layer, part, end = name.split(".")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        if part.startswith("rope_") or part == "ffn_up_exps":
            continue
        values = _floats(file, name)
        if part == "ffn_gate_exps":
            ups = _floats(file, name.replace("gate", "up"))
            out[prefix + "mlp.experts.gate_up_proj"] = np.concatenate([values, ups], axis=1)
            continue
        if gemma and part.endswith("norm"):
            values = values - 1
        if part in ("attn_q", "attn_k") and file.metadata["general.architecture"] == "llama":
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            values = _halves(values, heads)
        out[prefix + names[part] + ("" if part.endswith("exps") else f".{end}")] = values
    return out


def _halves(values: Floats, heads: int) -> Floats:
    """Converters reorder each head's rows from halves to neighbouring pairs; this turns them back."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape).copy()


def _floats(file: GGUFFile, name: str) -> Floats:
    info = file.tensors[name]
    return dequantize(info.type, file.data(name), info.shape)
