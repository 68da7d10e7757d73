"""What is in a checkpoint is told by its keys and tensors, and what would draft wrongly is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.drafters.checkpoint import open_checkpoint
from paceline.drafters.checkpoint_ids import target_ids
from paceline.drafters.checkpoint_names import recognise
from paceline.errors import ModelFileError, PacelineError, UnsupportedModelError, UsageError
from paceline.weights.quants import TensorType, dequantize
from support.eagle_gguf import write_eagle3_gguf
from support.folders import encoded, safetensors_bytes
from support.head_targets import compare, drafter_for, reference_for, target_for
from support.tiny_heads import Array, TinyHead
from support.tiny_mtp import TinyMtp
from support.tiny_tokenizer import VOCAB_SIZE

EAGLE3 = TinyHead(vocab=VOCAB_SIZE)

FOUND = {
    "SafeAILab": (EAGLE3, "eagle3", "SafeAILab"),
    "SpecForge": (replace(EAGLE3, layout="SpecForge"), "eagle3", "SpecForge"),
    "vLLM": (replace(EAGLE3, layout="vLLM"), "eagle3", "vLLM"),
    "speculators": (replace(EAGLE3, layout="speculators"), "eagle3", "speculators"),
    "DeepSpec": (replace(EAGLE3, layout="DeepSpec"), "eagle3", "DeepSpec"),
    "EAGLE-1": (TinyHead(kind="eagle", taps=(8,), draft_vocab=0), "eagle", "SafeAILab"),
    "Qwen": (TinyMtp(), "mtp", "Qwen"),
    "MiMo": (TinyMtp(layout="MiMo"), "mtp", "MiMo"),
    "MiMo V2": (TinyMtp(layout="MiMo V2"), "mtp", "MiMo V2"),
    "DeepSeek": (TinyMtp(layout="DeepSeek"), "mtp", "DeepSeek"),
    "MTP of speculators": (TinyMtp(layout="speculators"), "mtp", "speculators"),
    "nextn": (TinyMtp(layout="GGUF"), "mtp", "GGUF"),
}


@pytest.mark.parametrize("name", FOUND)
def test_kind_and_layout_are_recognised(name: str, tmp_path: Path) -> None:
    tiny, kind, layout = FOUND[name]
    found = open_checkpoint(tiny.write(tmp_path / "head"))
    assert (found.kind, found.layout) == (kind, layout)
    assert found.describe().startswith(f"{kind} head ({layout} layout), 1 layer, 0.")
    assert " as f32/q8_0: " in found.describe() or " as q8_0: " in found.describe()


@pytest.mark.parametrize(
    ("settings", "names", "kind"),
    [
        ({"speculators_model_type": "dflash2"}, ("fc.weight",), "dflash2"),
        ({"architectures": ["DFlash2DraftModel"]}, ("fc.weight",), "dflash2"),
        ({"architectures": ["PEagleDraftModel"]}, ("fc.weight",), "peagle"),
        ({"architectures": ["Qwen3DSparkModel"]}, ("fc.weight",), "dspark"),
        ({"architectures": ["DFlashDraftModel"]}, ("fc.weight",), "dflash"),
        ({}, ("fc.weight", "mask_hidden"), "peagle"),
        ({}, ("medusa_head.0.0.linear.weight",), "medusa"),
        ({}, ("emb.0.weight", "proj.0.weight", "ln.0.weight"), "mlp"),
        ({}, ("forget_emb.0.weight",), "lstm"),
        ({}, ("model.layers.0.self_attn.q_proj.weight",), "model"),
        ({"num_hidden_layers": 2}, ("model.layers.1.self_attn.q_proj.weight",), ""),
        ({"num_hidden_layers": 2}, ("model.layers.2.eh_proj.weight",), "mtp"),
        ({"mtp_num_hidden_layers": 1}, ("model.layers.0.self_attn.q_proj.weight",), "model"),
    ],
)
def test_tensors_count_for_more_than_names(
    settings: dict[str, Any], names: tuple[str, ...], kind: str
) -> None:
    assert recognise(settings, dict.fromkeys(names, (64, 192))) == kind


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("medusa_head.0.0.linear.weight", "Medusa heads do not run here yet"),
        ("emb.0.weight", "MLP speculators do not run here yet"),
        ("model.layers.0.self_attn.q_proj.weight", "complete model.*\nhint: give it as model:"),
        ("something.weight", "no drafter that is known here"),
    ],
)
def test_what_does_not_run_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(
        safetensors_bytes({name: encoded(np.zeros((4, 32), np.float32), "F32")})
    )
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["q8", "q4", "bf16", "f32"])
def test_matrices_are_rounded_as_asked(dtype: str, tmp_path: Path) -> None:
    tiny = replace(EAGLE3, own_embedding=True)
    found = open_checkpoint(tiny.write(tmp_path / "head"), dtype)
    kinds = {"q8": TensorType.Q8_0, "q4": TensorType.Q4_0, "bf16": TensorType.BF16, "f32": TensorType.F32}
    info = found.tensors["blk.0.attn_q.weight"]
    assert info.type is kinds[dtype]
    values = dequantize(info.type, found.data(info.name), info.shape)
    original = tiny.arrays()["midlayer.self_attn.q_proj.weight"]
    steps = {"q8": 1 / 127, "q4": 1 / 8, "bf16": 2.0**-8, "f32": 0.0}
    assert np.abs(values - original).max() <= steps[dtype] * np.abs(original).max()
    head = found.tensors["output.weight"].type
    assert head is (TensorType.Q8_0 if dtype == "q4" else kinds[dtype])
    assert found.tensors["token_embd.weight"].type is TensorType.F32
    assert found.tensors["output_norm.weight"].type is TensorType.F32
    np.testing.assert_array_equal(found.data("fc.weight"), found.data("fc.weight"))


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dtype of a drafter is 'q9'"):
        open_checkpoint(EAGLE3.write(tmp_path / "head"), "q9")


def nan(shape: tuple[int, ...]) -> Array:
    values = np.ones(shape, np.float32)
    values.reshape(-1)[3] = np.nan
    return values


REFUSED: dict[str, tuple[TinyHead, dict[str, Any], str]] = {
    "no ids": (
        replace(EAGLE3, layout="vLLM"),
        {"drop": "eagle_aux_hidden_state_layer_ids"},
        "does not say which",
    ),
    "ids beyond the target": (replace(EAGLE3, layout="vLLM", taps=(2, 4, 9)), {}, "of a target that has 8"),
    "ids that do not ascend": (replace(EAGLE3, layout="vLLM", taps=(4, 2, 5)), {}, "do not ascend"),
    "ids that are none": (
        replace(EAGLE3, layout="vLLM"),
        {"set": {"eagle_aux_hidden_state_layer_ids": ["2"]}},
        "a list of whole numbers",
    ),
    "fewer ids than states": (
        replace(EAGLE3, layout="vLLM"),
        {"set": {"eagle_aux_hidden_state_layer_ids": [2, 4]}},
        r"fc is \(64, 192\), for 2 layers",
    ),
    "another target's width": (replace(EAGLE3, width=96, hidden=96), {}, "fc is .* made for another model"),
    "no d2t": (EAGLE3, {"without": ["d2t"]}, "48 ids, the target 262, and there is no d2t"),
    "another vocabulary": (replace(EAGLE3, vocab=300, seed=5), {}, "t2d has 300 ids, the target 262"),
    "an incomplete layer": (EAGLE3, {"without": ["midlayer.mlp.up_proj.weight"]}, "no tensor blk.0.ffn_up"),
    "no norm": (EAGLE3, {"without": ["midlayer.hidden_norm.weight"]}, "no tensor blk.0.attn_norm_2"),
    "no fuse": (EAGLE3, {"without": ["fc.weight"]}, "no drafter that is known"),
    "NaN": (EAGLE3, {"change": {"fc.weight": nan((64, 192))}}, "infinite, not a number"),
    "NaN in a norm": (EAGLE3, {"change": {"norm.weight": nan((64,))}}, "infinite or not a number"),
    "a tensor too many": (EAGLE3, {"change": {"midlayer.extra.weight": nan((64, 64))}}, "not known here"),
    "a flag without its tensor": (
        replace(EAGLE3, layout="speculators", settings={"norm_before_fc": True}),
        {},
        "settings say norm_before_fc = True, its tensors say False",
    ),
    "EAGLE-1 of another width": (
        TinyHead(kind="eagle", vocab=VOCAB_SIZE, width=96, taps=(8,), draft_vocab=0),
        {},
        "96 wide, the target 64",
    ),
    "heads that do not divide": (replace(EAGLE3, settings={"num_attention_heads": 7}), {}, "7 heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_draft_wrongly_is_refused(name: str, tmp_path: Path) -> None:
    tiny, how, message = REFUSED[name]
    path = tiny.write(tmp_path / "head", without=how.get("without", ()), change=how.get("change"))
    config = json.loads((path / "config.json").read_text()) | how.get("set", {})
    config.pop(how.get("drop", ""), None)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PacelineError, match=f"(?s){message}") as caught:
        drafter_for(target_for(tmp_path), path, dtype="q8")
    assert caught.value.hint


def ids_of(tmp_path: Path, tiny: TinyHead, d2t: Array, *, marks: bool = True) -> list[int] | None:
    path = tiny.write(tmp_path / "head")
    stored = {name: encoded(values, "F32") for name, values in tiny.arrays().items()}
    stored["d2t"] = ("I64", d2t.shape, d2t.astype(np.int64).tobytes())
    if marks:
        kept = np.isin(np.arange(tiny.vocab), tiny.kept)
        stored["t2d"] = ("BOOL", kept.shape, kept.tobytes())
    (path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    found = target_ids(open_checkpoint(path), len(tiny.kept), tiny.vocab)
    return None if found is None else found.tolist()


def test_d2t_holds_offsets(tmp_path: Path) -> None:
    offsets = EAGLE3.kept - np.arange(48)
    assert ids_of(tmp_path, EAGLE3, offsets) == EAGLE3.kept.tolist()
    assert ids_of(tmp_path, EAGLE3, offsets, marks=False) == EAGLE3.kept.tolist()
    assert ids_of(tmp_path, EAGLE3, np.zeros(48), marks=False) == list(range(48))


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (EAGLE3.kept, "d2t holds ids where offsets are customary"),
        (np.arange(48)[::-1], "does not lead to ascending ids"),
        (np.full(48, 250), "leads to id 297, the target has 262"),
        (np.zeros(47), "d2t has 47 ids, the output 48"),
    ],
)
def test_other_maps_are_refused(d2t: Array, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        ids_of(tmp_path, EAGLE3, d2t)


# --- llama.cpp's eagle3 files ---


@pytest.mark.parametrize(
    "tiny", [EAGLE3, replace(EAGLE3, norm_before_fc=True, norm_before_residual=True, taps=(1, 5, 8))]
)
def test_eagle3_files_of_llama_cpp_run(tiny: TinyHead, tmp_path: Path) -> None:
    target = target_for(tmp_path)
    path = write_eagle3_gguf(tmp_path / "head.gguf", tiny, tiny.kept)
    compare(drafter_for(target, path), target, reference_for(target, tiny))


def test_offsets_in_a_gguf_file_are_refused(tmp_path: Path) -> None:
    path = write_eagle3_gguf(tmp_path / "head.gguf", EAGLE3, EAGLE3.kept - np.arange(48))
    with pytest.raises(ModelFileError, match="d2t holds offsets where ids are customary"):
        drafter_for(target_for(tmp_path), path)


def test_a_complete_gguf_model_is_no_head(tmp_path: Path) -> None:
    target_for(tmp_path)
    with pytest.raises(UnsupportedModelError, match="complete model and no head"):
        open_checkpoint(tmp_path / "target.gguf")
