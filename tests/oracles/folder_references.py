"""Folders that transformers itself runs, with a long greedy text of each; see record_folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core import Floats
from support.folders import TinyFolder

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [1.0 + i / 4 for i in range(16)],
}

FOLDERS: dict[str, TinyFolder] = {
    "llama": TinyFolder(family="llama"),
    "llama, tied": TinyFolder(family="llama", settings={"tie_word_embeddings": True}),
    "llama, heads narrower than the model": TinyFolder(family="llama", settings={"head_dim": None}),
    "llama 3 rope": TinyFolder(family="llama", settings={"rope_parameters": _LLAMA3}),
    "llama, linear rope": TinyFolder(
        family="llama",
        settings={"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama, yarn": TinyFolder(family="llama", settings={"rope_parameters": _YARN}),
    "llama, dynamic rope": TinyFolder(
        family="llama",
        settings={"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral, no window": TinyFolder(family="mistral"),
    "mistral": TinyFolder(family="mistral", settings={"sliding_window": 64}),
    "qwen2": TinyFolder(family="qwen2"),
    "qwen3": TinyFolder(family="qwen3"),
    "qwen3_moe": TinyFolder(family="qwen3_moe"),
    "qwen3_moe, weights as they come": TinyFolder(family="qwen3_moe", settings={"norm_topk_prob": False}),
    "gemma3_text": TinyFolder(family="gemma3_text"),
    "gemma3_text, another scale": TinyFolder(family="gemma3_text", settings={"query_pre_attn_scalar": 48}),
    "phi3": TinyFolder(family="phi3"),
    "phi3, half of each head turning": TinyFolder(family="phi3", settings={"partial_rotary_factor": 0.5}),
    "phi3, window": TinyFolder(family="phi3", settings={"sliding_window": 64}),
    "phi3, longrope": TinyFolder(
        family="phi3",
        # Ours turns by the longest text there may be, transformers by the text at hand: always a long one.
        settings={"rope_parameters": _LONG | {"factor": 4.0}, "original_max_position_embeddings": 8},
    ),
}


class TransformersFolder:
    """A folder run by transformers in float32."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logits(self, tokens: Sequence[int]) -> Floats:
        """Logits [n, vocab] of every position."""
        import torch

        with torch.inference_mode():
            out: Floats = self.model(torch.tensor([list(tokens)])).logits[0].numpy()
        return out

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        """A greedy text, and the smallest distance between a token's logit and the next likeliest."""
        import torch

        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack([row[0].topk(2).values for row in out.logits])
        return out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())
