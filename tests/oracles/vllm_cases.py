"""Random checkpoints that vLLM runs on a CPU; see record_vllm_heads.

It reads the layers of `eagle_config` as inputs, so that SpecForge's heads, whose trainer counts outputs, are
not among them. On a CPU it norms the text's keys of all layers by the first one's weights: alike here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from oracles.head_cases import LAYERS, VOCAB
from support.block_heads import TinyHead as TinyBlock
from support.tiny_heads import Array, TinyHead

VERIFIER = "TARGET"
"""Stands for the target's folder in settings."""


@dataclass(frozen=True)
class VllmCase:
    """A checkpoint and the method that vLLM is told."""

    head: TinyHead | TinyBlock
    method: str
    count: int = 4


@dataclass(frozen=True, kw_only=True)
class OneNorm(TinyBlock):
    """A block drafter whose layers norm their keys alike."""

    def arrays(self) -> dict[str, Array]:
        found = super().arrays()
        name = "layers.{}.self_attn.k_norm.weight"
        return found | {name.format(i): found[name.format(0)] for i in range(self.layers)}


@dataclass(frozen=True, kw_only=True)
class FlatHead(TinyHead):
    """An EAGLE-3 head in the names that vLLM reads from a file: those of its layers, and d2t."""

    layout: str = "vLLM"

    def mapped_by(self) -> str:
        return "d2t"


_ALGORITHM = {
    "algorithm": "eagle3",
    "default_proposal_method": "greedy",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
    "verifier": {"name_or_path": VERIFIER, "architectures": ["LlamaForCausalLM"]},
}


def _cases() -> dict[str, VllmCase]:
    eagle = TinyHead(
        kind="eagle", vocab=VOCAB, taps=(LAYERS,), draft_vocab=0, own_embedding=True, scale=0.8, head_dim=32,
        settings={"bias": False, "architectures": ["LlamaForCausalLM"]},
    )  # fmt: skip
    flat = FlatHead(vocab=VOCAB, taps=(2, 4, 5), draft_vocab=100, head_dim=32, own_embedding=True)
    theirs = replace(
        flat, layout="speculators", taps=(1, 4, 7), norm_before_fc=True, norm_before_residual=True,
        norm_output=True, layer={"hidden_act": "silu"},
        settings={"speculators_config": _ALGORITHM, "architectures": ["Eagle3Speculator"]},
    )  # fmt: skip
    block = OneNorm(vocab=VOCAB, target_layers=LAYERS, taps=(0, 3, 5))
    heads = {
        "EAGLE-1": (eagle, "eagle"),
        "EAGLE-3, layers by name": (flat, "eagle3"),
        "EAGLE-3, speculators": (theirs, "eagle3"),
        "DFlash": (block, "dflash"),
        "DFlash, windows": (replace(block, sliding=(0, 1), window=8), "dflash"),
        "DFlash, windows both ways": (
            replace(block, sliding=(0, 1), window=8, settings={"is_causal": False}),
            "dflash",
        ),
    }
    return {f"vLLM, {name}": VllmCase(*its) for name, its in heads.items()}


CASES = _cases()
