"""A drafter in outline takes, to the byte, what the same drafter takes when it is loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.core import Target
from paceline.drafters.checkpoint import Outline, open_checkpoint
from paceline.drafters.checkpoint_arrays import Array
from paceline.drafters.head_loading import load_head
from paceline.drafters.loading import Host, Outlined
from paceline.drafters.registry import create
from paceline.models.tally import Tally
from paceline.models.target import NativeTarget
from paceline.native import packed_bytes
from paceline.planning.pass_time import PassTime
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import TensorType
from support.block_cases import MODEL
from support.block_heads import TinyHead as TinyBlock
from support.tiny_heads import TinyHead
from support.tiny_mtp import TinyMtp
from support.tiny_pair import write_model
from support.tiny_peagle import TinyPeagle
from support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer
from support.zoo import ZOO

_EAGLE3 = TinyHead(vocab=VOCAB_SIZE, taps=(1, 2, 3), target_layers=4, layout="vLLM")
_MTP = TinyMtp(vocab=VOCAB_SIZE, taps=(4,), target_layers=4)
_SPARK = TinyBlock(layout="deepspec")
HEADS: dict[str, tuple[Any, dict[str, Any], bool]] = {  # checkpoint, options, whether it borrows the output
    "eagle": (replace(_EAGLE3, kind="eagle", draft_vocab=0, taps=(4,), bias=True), {}, True),
    "eagle3": (_EAGLE3, {}, False),
    "eagle3 in four bits": (_EAGLE3, {"dtype": "q4"}, False),
    "eagle3 with all it can have": (
        replace(_EAGLE3, layout="speculators", layers=2, own_embedding=True, norm_before_residual=True,
                norm_before_fc=True, norm_output=True),
        {"dtype": "bf16"},
        False,
    ),
    "peagle": (TinyPeagle(vocab=VOCAB_SIZE, taps=(1, 2, 3), target_layers=4), {}, False),
    "mtp": (_MTP, {}, True),
    "mtp of commonest ids": (_MTP, {"draft_vocab_size": 100}, False),
    "several mtp heads": (replace(_MTP, heads_in_file=3), {"heads": 2, "dtype": "f32"}, True),
    "mtp that brings all": (
        replace(_MTP, layout="DeepSeek", own_head=True, own_embedding=True, biases=True), {}, False,
    ),
    "dflash": (TinyBlock(), {}, True),
    "dflash with windows": (TinyBlock(sliding=(0,), window=6, own=True), {"dtype": "q4"}, False),
    "dspark": (replace(_SPARK, markov="vanilla", confidence=False), {}, True),
    "dspark of commonest ids": (replace(_SPARK, markov="vanilla"), {"draft_vocab_size": 100}, False),
    "dspark with gates": (replace(_SPARK, markov="gated", confidence=True), {}, True),
    "dspark with a state": (replace(_SPARK, markov="rnn", confidence=True, dtype="BF16"), {}, True),
}  # fmt: skip
LONGEST = 512


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("outline") / "target.gguf")


def host_of(target: Target, **more: Any) -> Host:
    measure = partial(PassTime.measure, seconds=0.0)
    return Host(tiny_tokenizer(), VOCAB_SIZE, 1, measure=measure, target=target, **more)


def own_arrays(network: Any) -> int:
    """Bytes of the arrays that a head keeps beside its program."""
    names = ("_features", "_hidden", "_logits", "_biases")
    return sum(getattr(network, name).nbytes for name in names if hasattr(network, name))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_takes_what_its_outline_says(name: str, path: Path, tmp_path: Path) -> None:
    tiny, options, borrows = HEADS[name]
    head = str(tiny.write(tmp_path / "head"))
    outlines: list[Outlined] = []
    with GGUFFile.open(path) as file:
        target = NativeTarget.outline(file, max_model_len=LONGEST)
        outlined: Any = load_head(host_of(target, outlines=outlines), head, **options)
        lender = NativeTarget.load(file, max_model_len=LONGEST, threads=1)
        drafter: Any = load_head(host_of(lender), head, **options)
    (outline,) = outlines
    network, real = outlined.network, drafter.network
    tally = next(part for part in vars(network).values() if isinstance(part, Tally))
    program = next(part for part in vars(real).values() if hasattr(part, "memory_bytes"))

    assert real.cache == network.cache == outline.needs.cache
    pages = real.pages * real.page_size * (real.cache.per_token + real.cache.window_per_token)
    lent = packed_bytes(int(TensorType.F32), VOCAB_SIZE, MODEL.width) if borrows else 0
    assert tally.matrices + tally.workspace == program.memory_bytes - pages - lent
    assert outline.needs.weights == tally.matrices + tally.vectors
    chosen = 4 * sum(
        values.size
        for of, values in tiny.arrays().items()
        if of.startswith(("markov_head.", "confidence_head.")) and "markov_w" not in of
    )
    assert outline.needs.workspace == tally.workspace + own_arrays(real) + chosen
    assert (outline.kind, outline.path, outline.heard) == (drafter.name, Path(head), len(drafter.layers))
    assert outline.most_waiting == (0 if drafter.name in ("dflash", "dspark") else 256 << 20)


def test_an_outline_reads_no_weight(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {
        "eagle3": _EAGLE3.write(tmp_path / "eagle3"),
        "dspark": replace(_SPARK, markov="rnn", confidence=True).write(tmp_path / "dspark"),
        "mtp": _MTP.write(tmp_path / "mtp"),
    }
    monkeypatch.setattr(Array, "values", None)
    monkeypatch.setattr("paceline.drafters.checkpoint.quantize", None)
    monkeypatch.setattr(NativeTarget, "load", None)
    with GGUFFile.open(path) as file:
        host = host_of(NativeTarget.outline(file), outlines=[])
        for kind, head in heads.items():
            few = ",draft_vocab_size=50" if kind == "mtp" else ""
            create(f"{kind}:{head}{few}", vocab_size=1, host=host)
    assert host.outlines is not None
    assert [one.kind for one in host.outlines] == list(heads)


def test_an_outline_has_a_table_of_the_right_shape(tmp_path: Path) -> None:
    found = open_checkpoint(_EAGLE3.write(tmp_path / "head"), outline=True)
    assert isinstance(found, Outline)
    assert found.values("fc.weight", 10, 30).shape == (20, 192)
    assert found.values("fc.weight", 50).shape == (14, 192)
    assert found.data("fc.weight").shape == (64 * 192 // 32 * 34,)
    assert found.nbytes == sum(4 * values.size for values in _EAGLE3.arrays().values())


def test_a_draft_model_in_outline(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = write_model(tmp_path / "draft.gguf", layers=1, context=128)
    monkeypatch.setattr(NativeTarget, "load", None)
    with GGUFFile.open(path) as file:
        host = host_of(NativeTarget.outline(file), outlines=[])
        create(f"model:{draft}", vocab_size=1, host=host)
        create(f"model:{draft},max_model_len=100", vocab_size=1, host=host)
    assert host.outlines is not None
    assert [(one.kind, one.path, one.context_limit) for one in host.outlines] == [
        ("model", draft, 128),
        ("model", draft, 100),
    ]
    with GGUFFile.open(draft) as file:
        assert host.outlines[0].needs == NativeTarget.outline(file).needs
        assert host.outlines[0].stored == sum(info.nbytes for info in file.tensors.values())


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.Q4_0, TensorType.Q8_0])
@pytest.mark.parametrize("name", ["qwen3moe", "gemma3"])
def test_a_model_takes_what_its_outline_says(tmp_path: Path, name: str, kind: TensorType) -> None:
    model = replace(ZOO[name], kind=kind, kinds={}, tied=False)
    with GGUFFile.open(model.write(tmp_path / "m.gguf")) as file:
        real = NativeTarget.load(file, max_model_len=LONGEST, threads=1)
        needs = NativeTarget.outline(file).needs
    vectors = sum(len(tensor.raw) for of, tensor in model.tensors().items() if "norm" in of)
    kept = real.pages * 32 * real.cache.per_token
    near = 0 if real.window is None else real.window.pages * 32 * real.cache.window_per_token
    assert needs.weights - vectors + needs.workspace == real._program.memory_bytes - kept - near
    assert needs.cache == real.cache
