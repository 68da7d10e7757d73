"""A drafter that lies with its model needs no flag; one that does not belong is named and left alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import run as command
from paceline.core import SamplingParams
from paceline.drafters.beside import Found, find_drafters
from paceline.engine import LLM
from paceline.tools.describe import describe
from paceline.weights.source import open_model
from support.block_cases import MODEL
from support.block_gguf import write_block_gguf
from support.block_heads import TinyHead as TinyBlock
from support.folders import TinyFolder
from support.gguf_writer import write_gguf
from support.tiny_heads import TinyHead
from support.tiny_mtp import TinyMtp
from support.tiny_pair import write_model
from support.tiny_tokenizer import metadata as tokenizer

ON = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FREE = ["grammar", "suffix", "prediction"]
EAGLE3 = TinyHead(vocab=MODEL.vocab, taps=(1, 2, 3), target_layers=4, layout="vLLM")
SPARK = TinyBlock(layout="deepspec", own=True, markov="vanilla")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", MODEL.metadata() | tokenizer(), MODEL.tensors())


def dflash(path: Path, **how: Any) -> Path:
    return write_block_gguf(path, TinyBlock(**how), first=False)


def found_near(model: Path) -> list[Found]:
    with open_model(model) as file:
        return find_drafters(file)


def load(model: Path, speculate: Any = "auto") -> LLM:
    return LLM(model, threads=1, max_model_len=128, speculate=speculate)


def test_a_file_beside_the_model_drafts_without_being_named(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file = dflash(tmp_path / "model-DFlash.gguf")
    with load(model) as llm:
        done = llm.generate("abc", ON)
        fixed = llm.generate("abc", ON, speculate="auto:num_speculative_tokens=3")
        plain = llm.generate("abc", ON, speculate="off")
    assert done.speculation.drafters == fixed.speculation.drafters == ["dflash", *FREE]
    assert fixed.speculation.by_drafter["dflash"].drafted > 0
    assert done.tokens == fixed.tokens == plain.tokens
    assert plain.speculation.drafters == []
    assert [r.message for r in caplog.records if str(file) in r.message] == [
        f"dflash head (GGUF layout), 2 layers, 0.1 M weights as q8_0: {file}"
    ]


@pytest.mark.parametrize(
    ("speculate", "names"),
    [
        ("auto", ["dflash", *FREE]),
        ("auto:find=false", FREE),
        ({"method": "auto", "find": False}, FREE),
        ("suffix", ["suffix"]),
        (["ngram", "auto"], ["ngram", "dflash", *FREE]),
        (["auto", "eagle3:{eagle3}"], [*FREE, "eagle3"]),
        ("auto:{eagle3}", ["eagle3", *FREE]),
        ("off", []),
    ],
)
def test_who_names_a_model_gets_no_other(
    speculate: Any, names: list[str], model: Path, tmp_path: Path
) -> None:
    dflash(tmp_path / "dflash.gguf")
    path = EAGLE3.write(tmp_path / "elsewhere" / "head")
    said = json.loads(json.dumps(speculate).replace("{eagle3}", str(path)))
    with load(model, said) as llm:
        assert llm.generate("abc", replace(ON, max_tokens=1)).speculation.drafters == names


def test_the_best_of_several_is_taken(model: Path, tmp_path: Path) -> None:
    eagle3 = EAGLE3.write(tmp_path / "model-EAGLE3")
    block = dflash(tmp_path / "a-dflash.gguf")
    other = dflash(tmp_path / "b-dflash.gguf")
    assert found_near(model) == [
        Found("dflash", block),
        Found("dflash", other, rival="dflash"),
        Found("eagle3", eagle3, rival="dflash"),
    ]
    spark = write_block_gguf(tmp_path / "z-dspark.gguf", SPARK, first=True)
    assert found_near(model)[0] == Found("dspark", spark)


STRANGERS: dict[str, tuple[Any, str]] = {
    "another width": (lambda p: dflash(p / "dflash.gguf", width=96), "layers of the target"),
    "more layers": (lambda p: dflash(p / "dflash.gguf", taps=(1, 4)), "of a target that has 4"),
    "another vocabulary": (
        lambda p: dflash(p / "dflash.gguf", vocab=300),
        "knows 300 tokens, the target 262",
    ),
    "a folder of another depth": (
        lambda p: TinyBlock(target_layers=36).write(p / "dflash"),
        "this one has 4",
    ),
    "eagle3 of another width": (
        lambda p: replace(EAGLE3, width=96).write(p / "eagle3"),
        r"fc is \(96, 288\), for 3 layers",
    ),
    "eagle3 of another vocabulary": (lambda p: replace(EAGLE3, vocab=300).write(p / "eagle3"), "t2d has 300"),
    "eagle of another width": (
        lambda p: TinyHead(kind="eagle", width=96, draft_vocab=0, taps=(4,)).write(p / "eagle"),
        "it is 96 wide, the target 64",
    ),
    "mtp of another width": (lambda p: TinyMtp(width=96).write(p / "mtp"), "it is 96 wide, the target 64"),
    "a mixture": (
        lambda p: TinyMtp().write(
            p / "mtp", change={"mtp.layers.0.mlp.gate.weight": EAGLE3.kept[None] * 1.0}
        ),
        "a mixture of experts",
    ),
    "no drafter": (
        lambda p: write_model(p / "mtp.gguf", layers=1),
        "complete model and no head that drafts",
    ),
    "a large draft": (
        lambda p: write_model(p / "draft.gguf", layers=9, width=64, hidden=256),
        "a complete model, and not a small one",
    ),
    "a damaged file": (lambda p: (p / "dflash.gguf").write_bytes(b"GGUF"), "past the end of the file"),
    "a page": (lambda p: (p / "eagle3.gguf").write_bytes(b"<!DOCTYPE html>"), "a web page"),
    "a damaged folder": (
        lambda p: ((p / "dflash").mkdir(), (p / "dflash" / "config.json").write_text("{")),
        "is not JSON|has no model.safetensors",
    ),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_what_does_not_belong_is_left_alone(
    name: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    make, message = STRANGERS[name]
    make(tmp_path)
    (found,) = found_near(model)

    assert re.search(message, found.obstacle), found.obstacle
    with load(model) as llm:
        done = llm.generate("abc", replace(ON, max_tokens=2))
        llm.generate("abc", replace(ON, max_tokens=2), speculate=["ngram", "auto"])
    assert done.speculation.drafters == FREE
    assert [r.message for r in caplog.records if "is not used to draft" in r.message] == [
        f"{found.path} is not used to draft: {found.obstacle}"
    ]


def test_what_fails_to_load_is_left_alone_too(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    arrays = TinyBlock().arrays()
    arrays["fc.weight"][0, 0] = float("nan")
    path = TinyBlock().write(tmp_path / "dflash", arrays)
    with load(model) as llm:
        assert llm.generate("abc", replace(ON, max_tokens=2)).speculation.drafters == FREE
    assert f"{path} is not used to draft" in caplog.text
    EAGLE3.write(tmp_path / "eagle3")
    with load(model) as llm:  # the next best stands in
        assert llm.generate("abc", replace(ON, max_tokens=2)).speculation.drafters == ["eagle3", *FREE]


def test_a_small_model_called_a_draft_drafts(model: Path, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model-draft.gguf", layers=1, width=32)
    assert found_near(model) == [Found("model", file)]
    with load(model) as llm:
        done = llm.generate("abc", ON)
        assert done.speculation.drafters == ["model", *FREE]
        assert done.tokens == llm.generate("abc", ON, speculate="off").tokens


def test_a_folder_in_the_models_folder(tmp_path: Path) -> None:
    folder = TinyFolder(family="qwen3").write(tmp_path / "models" / "big")
    block = TinyBlock(target_layers=2, vocab=258, taps=(0, 1)).write(folder / "dflash")
    assert found_near(folder) == [Found("dflash", block)]
    with load(folder) as llm:
        assert llm.generate("abc", replace(ON, max_tokens=2)).speculation.drafters == ["dflash", *FREE]


def written_with_head(path: Path, more: Mapping[str, Any] | None = None) -> Path:
    """The model's file with an MTP head in it."""
    tiny = TinyMtp(vocab=MODEL.vocab, target_layers=4, taps=(4,), layout="GGUF", qk_norm=True, head_dim=32)
    head = {name: tensor for name, tensor in tiny.gguf_tensors().items() if name.startswith("blk.")}
    keys = {"qwen3.nextn_predict_layers": 1, "qwen3.block_count": 5, **dict(more or {})}
    return write_gguf(path, MODEL.metadata() | tokenizer() | keys, {**MODEL.tensors(), **head})


def test_show_and_check_tell_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written_with_head(tmp_path / "model.gguf")
    assert describe(model).drafters == ["mtp, in the model's own files"]
    file = dflash(tmp_path / "dflash.gguf")
    wide = dflash(tmp_path / "wide-dflash.gguf", width=96)
    lines = [
        f"dflash, found in {file}",
        "model.gguf is not used: dflash is there too",
        f"wide-dflash.gguf is not used: {found_near(model)[2].obstacle}",
    ]
    assert str(wide) in lines[2]
    assert command(["show", str(model)]) == 0
    shown = capsys.readouterr().out
    assert [
        line.split("  ", 1)[1].strip() for line in shown.splitlines() if line.startswith("drafter")
    ] == lines
    assert command(["check", str(model), "--cases", "3", "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["drafters"] == lines
    assert found["identical"] is True


def test_nothing_is_found_where_nothing_is(model: Path) -> None:
    assert found_near(model) == []
    assert describe(model).drafters == []
