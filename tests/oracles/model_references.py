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
        rope: scaling parameters as transformers spells them; None means what the file's metadata says of
            linear scaling.
    """

    def __init__(self, path: Path, rope: dict[str, Any] | None = None) -> None:
        import torch

        with GGUFFile.open(path) as file:
            config = _config(file, rope)
            weights = {
                _name(name): torch.from_numpy(_values(file, name, config))
                for name in file.tensors
                if name != "rope_freqs.weight"
            }
        kind = _classes()[str(file.metadata["general.architecture"])][1]
        self.model = kind(config).to(torch.float32).eval()
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


def _classes() -> dict[str, tuple[Any, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    return {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def _config(file: GGUFFile, rope: dict[str, Any] | None) -> Any:
    architecture = str(file.metadata["general.architecture"])

    def key(name: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.{name}", default)

    heads = key("attention.head_count")
    if rope is None and key("rope.scaling.type") == "linear":
        rope = {"rope_type": "linear", "factor": key("rope.scaling.factor")}
    return _classes()[architecture][0](
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=key("attention.head_count_kv", heads),
        head_dim=key("attention.key_length", key("embedding_length") // heads),
        max_position_embeddings=key("context_length"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "rope_theta": key("rope.freq_base", 10000.0),
            **(rope or {"rope_type": "default"}),
        },
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_output.bias" in file.tensors,
        bos_token_id=None,
        eos_token_id=None,
    )


def _name(name: str) -> str:
    *layer, part, kind = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{_NAMES[part]}.{kind}"


def _values(file: GGUFFile, name: str, config: Any) -> Floats:
    info = file.tensors[name]
    values = dequantize(info.type, file.data(name), info.shape)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    if heads is None or file.metadata["general.architecture"] != "llama":
        return values
    # Converters reorder each head's rows from halves to neighbouring pairs; this turns them back.
    return values.reshape(heads, -1, 2, info.shape[1]).swapaxes(1, 2).reshape(info.shape).copy()
