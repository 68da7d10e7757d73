"""`paceline plan MODEL` with drafters: each that takes memory is counted, to the byte; none is ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import run
from paceline.models.target import NativeTarget
from support.block_cases import MODEL
from support.block_gguf import write_block_gguf
from support.block_heads import TinyHead as TinyBlock
from support.gguf_writer import write_gguf
from support.tiny_heads import TinyHead
from support.tiny_mtp import TinyMtp
from support.tiny_pair import write_model
from support.tiny_tokenizer import VOCAB_SIZE
from support.tiny_tokenizer import metadata as tokenizer

EAGLE3 = TinyHead(vocab=VOCAB_SIZE, taps=(1, 2, 3), target_layers=4, layout="vLLM")
MTP = TinyMtp(vocab=VOCAB_SIZE, target_layers=4, taps=(4,), layout="GGUF", qk_norm=True, head_dim=32)

_EAGLE3_VALUES = 64 * 192 + 2 * 64 * 64 + 2 * 32 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96 + 48 * 64
_EAGLE3_ROW = 4 * (4 * 64 + 64 + 192) + 2 * (64 + 64 + 96 + 64 + 192 + 128) + 4 * (192 + 4 * 64)


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeTarget, "load", None)
    monkeypatch.setattr("paceline.tools.plan.resident", lambda: 100 << 20)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", MODEL.metadata() | tokenizer(), MODEL.tensors())


class Plan:
    """What the command prints as JSON.

    Attributes:
        parts: bytes by name, all but those of the runtime and of the model itself.
    """

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said
        self.parts = {
            part["name"]: part["bytes"]
            for part in said["parts"]
            if part["name"] != "runtime" and not part["name"].endswith("of model.gguf")
        }


@pytest.fixture
def plan(model: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def planned(*flags: str, path: Path = model, code: int = 0, memory: str = "4GiB") -> Plan:
        room = () if "--gpu" in flags else ("--memory", memory)
        assert run(["plan", str(path), "-c", "1024", *room, *flags, "--json"]) == code
        return Plan(json.loads(capsys.readouterr().out))

    return planned


def test_a_head_is_counted_to_the_byte(plan: Any, tmp_path: Path) -> None:
    head = EAGLE3.write(tmp_path / "elsewhere" / "head")
    found = plan("--drafter", f"eagle3:{head}")
    assert found.parts == {
        "weights of eagle3 head head": _EAGLE3_VALUES * 34 // 32 + 2 * 4 * 64 * 4,
        "workspace of eagle3 head head": 256 * _EAGLE3_ROW + 16 * 48 * 4,
        "states for eagle3 head head": 2 * 512 * 3 * 64 * 4,
        "KV cache of eagle3 head head": 1024 * 2 * 2 * 16 * 2,
    }
    assert found.said["notes"] == [
        "the states of 512 tokens are counted as waiting for the eagle3 head head; those of a long prompt "
        "wait until it first drafts, 1 MiB at most"
    ]
    twice = plan("--drafter", f"eagle3:{head}", "-np", "3")
    assert twice.parts["KV cache of eagle3 head head"] == 3 * 1024 * 128


def test_options_decide_what_it_takes(plan: Any, tmp_path: Path) -> None:
    head = EAGLE3.write(tmp_path / "elsewhere" / "head")
    weights, norms = "weights of eagle3 head head", 2 * 4 * 64 * 4
    output = 48 * 64
    assert plan("--drafter", f"eagle3:{head},dtype=f32").parts[weights] == 4 * _EAGLE3_VALUES + norms
    assert plan("--drafter", f"eagle3:{head},dtype=q4,num_speculative_tokens=3").parts[weights] == (
        (_EAGLE3_VALUES - output) * 18 // 32 + output * 34 // 32 + norms
    )
    config = json.dumps({"method": "eagle3", "model": str(head), "dtype": "f32"})
    assert plan("--speculative-config", config).parts[weights] == 4 * _EAGLE3_VALUES + norms
    as_it_is = plan("--drafter", f"auto:{head},dtype=q4", "--gpu", "24GiB").parts[weights]
    assert as_it_is == 4 * sum(values.size for values in EAGLE3.arrays().values())


def test_fewer_ids_take_less_than_the_output_that_is_lent(plan: Any, tmp_path: Path) -> None:
    head = replace(MTP, layout="DeepSeek", qk_norm=False).write(tmp_path / "elsewhere" / "head")
    name = "weights of mtp head head"
    lent = plan("--drafter", f"mtp:{head}").parts[name]
    few = plan("--drafter", f"mtp:{head},draft_vocab_size=40").parts[name]
    assert few - lent == 48 * 64 * 34 // 32  # 42 rows in blocks of 16


def test_sliding_layers_keep_their_window(plan: Any, tmp_path: Path) -> None:
    block = TinyBlock(sliding=(0,), window=40)
    head = block.write(tmp_path / "elsewhere" / "head")
    layer = 2 * 2 * 32 * 2
    found = plan("--drafter", f"dflash:{head}")
    assert found.parts["KV cache of dflash head head"] == 1024 * layer + (40 + 32 + 256) * layer
    assert found.said["notes"] == []  # it files states as they come


def test_a_head_in_the_models_own_files(plan: Any, tmp_path: Path) -> None:
    head = {name: tensor for name, tensor in MTP.gguf_tensors().items() if name.startswith("blk.")}
    keys = {"qwen3.nextn_predict_layers": 1, "qwen3.block_count": 5}
    (tmp_path / "whole").mkdir()
    whole = write_gguf(
        tmp_path / "whole" / "model.gguf",
        MODEL.metadata() | tokenizer() | keys,
        {**MODEL.tensors(), **head},
    )
    bare, without = plan("--drafter", "off"), plan("--drafter", "off", path=whole)
    assert without.parts == bare.parts == {}
    assert [part for part in without.said["parts"] if part["name"] != "runtime"] == [
        part for part in bare.said["parts"] if part["name"] != "runtime"
    ]
    found, named = plan(path=whole), plan("--drafter", "mtp", path=whole)
    assert found.parts == named.parts
    matrices = sum(len(t.raw) // 4 for t in head.values() if len(t.shape) == 2)
    name = "weights of mtp head in the model's own files"
    assert 0 <= found.parts[name] - matrices * 34 // 32 < 5000  # norms, once for each part
    assert found.parts["KV cache of mtp head in the model's own files"] == 1024 * 2 * 2 * 32 * 2


def test_what_auto_finds_is_counted_and_named(plan: Any, tmp_path: Path) -> None:
    write_block_gguf(tmp_path / "model-dflash.gguf", TinyBlock(), first=False)
    name = "weights of dflash head model-dflash.gguf, found beside the model"
    assert name in plan().parts
    assert plan("--drafter", "ngram,auto").parts == plan().parts
    assert plan("--drafter", "auto:find=false").parts == plan("--drafter", "off").parts == {}
    short = plan(code=1, memory=str(plan().said["total"] - 1))
    size = sum(short.parts.values()) / 2**20
    assert short.said["advice"][1] == (
        "do without the dflash head model-dflash.gguf, found beside the model (--speculate auto:find=false), "
        f"{size:.0f} MiB; n-gram and suffix drafting need no memory to speak of"
    )


def test_what_takes_next_to_nothing_adds_nothing(plan: Any) -> None:
    for spec in ("ngram", "ngram:min=2,max=4", "suffix", "prediction", "grammar", "ngram,suffix", "auto"):
        assert plan("--drafter", spec).parts == {}


def test_a_draft_model_that_sees_less(plan: Any, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "elsewhere.gguf", layers=1, context=128)
    found = plan("--drafter", f"model:{draft}")
    assert found.parts["KV cache of draft model elsewhere.gguf"] == 128 * 2 * 16 * 2
    assert found.said["notes"] == ["beyond 128 tokens of text the draft model elsewhere.gguf is silent"]
    shorter = plan("--drafter", f"model:{draft},max_model_len=100")
    assert shorter.parts["KV cache of draft model elsewhere.gguf"] == 100 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("eagle3:{head},dtyp=q4", "eagle3 has no option 'dtyp'", "did you mean 'dtype'"),
        ("eagle3:{head},dtype=q5", "option dtype of a head is 'q5'", "known: auto, bf16, f32, q4, q8"),
        ("eagel3:{head}", "there is no drafter 'eagel3'", "did you mean 'eagle3'"),
        ("eagle3", "drafter 'eagle3' needs a model", "write eagle3:MODEL"),
        ("ngram:mni=2", "ngram has no option 'mni'", "did you mean 'min'"),
        ("mtp:{head}", "holds a drafter of kind eagle3, not mtp", "write eagle3:"),
        ("off,ngram", "--speculate off excludes", "leave the others out"),
    ],
)
def test_what_run_refuses_plan_refuses(
    spec: str, message: str, hint: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = EAGLE3.write(tmp_path / "elsewhere" / "head")
    assert run(["plan", str(model), "--drafter", spec.replace("{head}", str(head))]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert hint in said.err
    assert said.out == ""


def test_a_head_of_another_model_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = replace(EAGLE3, width=96).write(tmp_path / "elsewhere" / "head")
    assert run(["plan", str(model), "--drafter", f"eagle3:{head}"]) == 1
    assert "fc is (96, 288), for 3 layers of a target 64 wide it must be (96, 192)" in capsys.readouterr().err


def test_people_read_the_same(
    plan: Any, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = EAGLE3.write(tmp_path / "elsewhere" / "head")
    flags = ["-c", "1024", "--drafter", f"eagle3:{head}"]
    total = plan("--drafter", f"eagle3:{head}").said["total"]
    assert run(["plan", str(model), "--memory", str(total - 1), *flags]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "weights of eagle3 head head 0.1 MiB" in [" ".join(line.split()) for line in lines]
    assert "1024 tokens: does not fit; at most 1023 tokens would" in lines
    assert (
        "- do without the eagle3 head head, 2 MiB; n-gram and suffix drafting need no memory to speak of"
        in lines
    )
    assert any(line.startswith("- the states of 512 tokens are counted") for line in lines)
