"""MTP heads compute what their papers say, in every layout that runs; the others are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ModelFileError, UnsupportedModelError
from support.head_targets import compare, drafter_for, reference_for, target_for
from support.tiny_mtp import ReferenceMtp, TinyMtp
from support.tiny_tokenizer import VOCAB_SIZE

MTP = TinyMtp(vocab=VOCAB_SIZE)

HEADS = {
    "Qwen": MTP,
    "Qwen with normalised queries": replace(MTP, qk_norm=True, head_dim=32),
    "MiMo": replace(MTP, layout="MiMo", biases=True),
    "MiMo V2": replace(MTP, layout="MiMo V2", post_hidden=False, post_chain=False, heads_in_file=3),
    "DeepSeek": replace(MTP, layout="DeepSeek", own_embedding=True, own_head=True),
    "GLM": replace(MTP, layout="DeepSeek", biases=True),
    "speculators": replace(MTP, layout="speculators"),
    "GGUF": replace(MTP, layout="GGUF", own_head=True),
    "GGUF, two heads": replace(MTP, layout="GGUF", heads_in_file=2),
}
CONFLICTS = {
    "raw in": (replace(MTP, layout="DeepSeek", post_hidden=False), {"hidden": "pre"}),
    "raw on": (replace(MTP, layout="DeepSeek", post_chain=False), {"chain": "pre"}),
    "normed": (replace(MTP, layout="MiMo V2"), {"hidden": "post", "chain": "post"}),
}


def check(tiny: TinyMtp, folder: Path, **options: Any) -> None:
    target = target_for(folder)
    drafter = drafter_for(target, tiny.write(folder / "head"), **options)
    compare(drafter, target, reference_for(target, tiny, ReferenceMtp))


@pytest.mark.parametrize("name", HEADS)
def test_logits_and_guesses_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    check(HEADS[name], tmp_path)


@pytest.mark.parametrize("name", CONFLICTS)
def test_where_engines_disagree_the_user_decides(name: str, tmp_path: Path) -> None:
    tiny, options = CONFLICTS[name]
    check(tiny, tmp_path, **options)
    with pytest.raises(AssertionError):
        check(tiny, tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mtp.layers.0.mlp.gate.weight", (4, 64), "a mixture of experts"),
        ("mtp.layers.0.self_attn.q_proj.weight", (128, 64), "gated"),
        ("mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight", (32, 64), "latent attention"),
        ("mtp.layers.0.hc_attn.weight", (32, 64), "several streams"),
    ],
)
def test_layers_that_do_not_run_are_refused_by_name(
    name: str, shape: tuple[int, int], message: str, tmp_path: Path
) -> None:
    path = MTP.write(tmp_path / "head", change={name: np.zeros(shape, np.float32)})
    with pytest.raises(UnsupportedModelError, match=message):
        drafter_for(target_for(tmp_path), path)


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    path = replace(MTP, width=96).write(tmp_path / "head")
    with pytest.raises(ModelFileError, match="96 wide, the target 64"):
        drafter_for(target_for(tmp_path), path)
