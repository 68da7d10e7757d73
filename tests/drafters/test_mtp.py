"""MTP heads compute what their papers say, in every layout that runs; the others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core import SamplingParams
from paceline.drafters.loading import load_head
from paceline.drafters.registry import configure
from paceline.engine.engine import Engine
from paceline.errors import ModelFileError, UnsupportedModelError, UsageError
from paceline.models.target import NativeTarget
from paceline.weights.gguf import GGUFFile
from paceline.weights.source import open_model
from support.engines import TOKENIZER, run, same
from support.folders import TinyFolder, encoded, safetensors_bytes
from support.gguf_writer import write_gguf
from support.head_targets import MODEL, compare, drafter_for, host_for, reference_for, target_for
from support.mtp_heads import ReferenceHeads
from support.planners import FixedPlanner
from support.tiny_heads import Array
from support.tiny_mtp import ReferenceMtp, TinyMtp
from support.tiny_tokenizer import VOCAB_SIZE

MTP = TinyMtp(vocab=VOCAB_SIZE)

HEADS = {
    "Qwen": MTP,
    "Qwen with normalised queries": replace(MTP, qk_norm=True, head_dim=32),
    "MiMo": replace(MTP, layout="MiMo", biases=True),
    "MiMo V2": replace(MTP, layout="MiMo V2", post_hidden=False, post_chain=False, heads_in_file=3),
    "MiMo, two heads": replace(MTP, layout="MiMo", biases=True, heads_in_file=2),
    "Qwen, three layers": replace(MTP, heads_in_file=3),
    "DeepSeek, all its own": replace(
        MTP, layout="DeepSeek", own_embedding=True, own_head=True, heads_in_file=2
    ),
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
    compare(drafter, target, reference_for(target, tiny, ReferenceHeads))


@pytest.mark.parametrize("name", HEADS)
def test_logits_and_guesses_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    check(HEADS[name], tmp_path)


def test_the_first_head_alone_can_make_all_steps(tmp_path: Path) -> None:
    tiny = replace(MTP, layout="MiMo", biases=True, heads_in_file=3)
    target, path = target_for(tmp_path), tiny.write(tmp_path / "head")
    drafters: list[Any] = [drafter_for(target, path, heads=count) for count in (1, 2, 3, 9)]
    assert [its.head.config.layers for its in drafters] == [1, 2, 3, 3]
    for drafter in drafters:
        reference = reference_for(target, tiny, ReferenceHeads)
        reference.used = drafter.head.config.layers
        compare(drafter, target, reference)
        drafter.reset()
        reference.used = 3 if reference.used < 3 else 2
        with pytest.raises(AssertionError):
            compare(drafter, target, reference)


@pytest.mark.parametrize("value", [0, -1, "x", True])
def test_a_count_of_heads_is_a_positive_number(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"option heads of mtp is {value!r}\nhint: give a positive number"):
        configure({"method": "mtp", "heads": value}, vocab_size=9)


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


def with_head(folder: TinyFolder, tiny: TinyMtp, path: Path, more: Mapping[str, Array] | None = None) -> Path:
    """A folder that ships its head."""
    folder.write(path)
    head = {**dict(more or {})} | {tiny.name(name): values for name, values in tiny.arrays_of(0).items()}
    stored = {name: encoded(values, "F32") for name, values in {**folder.arrays(), **head}.items()}
    (path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    return path


SHIPPED = {
    "MiMo": (TinyFolder(family="mimo"), "MiMo"),
    "Qwen": (TinyFolder(family="qwen3", settings={"mtp_num_hidden_layers": 1}), "Qwen"),
    "DeepSeek": (TinyFolder(family="llama", settings={"num_nextn_predict_layers": 1}), "DeepSeek"),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_model_that_ships_its_head_needs_no_path(name: str, tmp_path: Path) -> None:
    folder, layout = SHIPPED[name]
    tiny = TinyMtp(layout=layout, vocab=258, head_dim=32, taps=(2,), target_layers=2, biases=name == "MiMo")
    with open_model(with_head(folder, tiny, tmp_path / "model")) as file:
        target = NativeTarget.load(file, threads=1, max_model_len=256)
        drafter: Any = load_head(host_for(target), kind="mtp", dtype="f32")
        assert drafter.head.checkpoint.layout == layout
        found = configure("auto", vocab_size=258, host=host_for(target)).drafters
        assert [its.name for its in found] == ["mtp", "grammar", "suffix", "prediction"]
        plain = run(Engine(target, TOKENIZER), [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=9))
        done = run(
            Engine(target, TOKENIZER),
            [5, 6, 7],
            SamplingParams(temperature=0.0, max_tokens=9),
            FixedPlanner(drafter, 3),
        )
        same(plain, done)
        assert done.speculation.drafted > 0
    with open_model(folder.write(tmp_path / "plain")) as file:
        bare = NativeTarget.load(file, threads=1, max_model_len=256)
        with pytest.raises(UnsupportedModelError, match=r"no head that drafts for one\nhint: leave mtp out"):
            load_head(host_for(bare), kind="mtp")
        assert len(configure("auto", vocab_size=258, host=host_for(bare)).drafters) == 3


def test_a_head_that_does_not_run_leaves_the_model_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = TinyFolder(family="qwen3", settings={"mtp_num_hidden_layers": 1})
    tiny = TinyMtp(vocab=258, head_dim=32, target_layers=2)
    path = with_head(folder, tiny, tmp_path / "model", {"mtp.layers.0.mlp.gate.weight": np.ones((4, 64))})
    with open_model(path) as file:
        host = host_for(NativeTarget.load(file, threads=1, max_model_len=256))
        assert len(configure("auto", vocab_size=258, host=host).drafters) == 3
    assert "a mixture of experts" in caplog.text


def test_auto_takes_any_head_at_a_path(tmp_path: Path) -> None:
    host = host_for(target_for(tmp_path))
    path = MTP.write(tmp_path / "head")
    for spec in (f"auto:{path}", f"auto:model={path},dtype=bf16", {"method": "auto", "model": str(path)}):
        found = configure(spec, vocab_size=VOCAB_SIZE, host=host).drafters
        assert [its.name for its in found] == ["mtp", "grammar", "suffix", "prediction"]


def test_a_gguf_file_that_ships_its_head_needs_no_path(tmp_path: Path) -> None:
    model = replace(MODEL, layers=2, architecture="qwen2")
    tiny = replace(MTP, target_layers=2, taps=(2,), layout="GGUF")
    more = {"qwen2.nextn_predict_layers": 1, "qwen2.block_count": 3}
    head = {name: tensor for name, tensor in tiny.gguf_tensors().items() if name.startswith("blk.")}
    path = write_gguf(tmp_path / "m.gguf", model.metadata() | more, {**model.tensors(), **head})
    target = NativeTarget.load(GGUFFile.open(path), threads=1, max_model_len=256)
    assert target.config.layers == 2
    drafter: Any = load_head(host_for(target), kind="mtp", dtype="f32")
    compare(drafter, target, reference_for(target, tiny, ReferenceMtp))
