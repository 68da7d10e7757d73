"""llama.cpp's GGUF files of block drafters compute what the checkpoints they were made of do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.drafters.checkpoint import open_checkpoint
from paceline.drafters.dflash_model import Block
from paceline.engine.engine import Engine
from paceline.errors import PacelineError, UnsupportedModelError
from support.block_cases import (
    PROMPT,
    Case,
    Checked,
    furthest,
    greedy,
    load_head,
    oracle_for,
    random_states,
    target_at,
    wide,
)
from support.block_gguf import write_block_gguf
from support.block_heads import GONE, TinyHead
from support.engines import TOKENIZER, run, same
from support.gguf_writer import Tensor, write_gguf

CASES = {
    "DFlash": Case(TinyHead()),
    "DFlash with windows": Case(TinyHead(sliding=(0,), settings={"is_causal": False})),
    "DFlash, causal": Case(TinyHead(settings={"is_causal": True}), causal=(True, True)),
    "DFlash with its own vocabulary": Case(TinyHead(layout="speculators", draft_vocab=100)),
    "DFlash with its own tables": Case(TinyHead(layout="deepspec", own=True), first=True),
    "DSpark": Case(TinyHead(layout="deepspec", own=True, markov="vanilla", confidence=True), first=True),
    "DSpark without confidence": Case(TinyHead(layout="specforge", markov="vanilla"), first=True),
    "DSpark, bonus anchor": Case(
        TinyHead(
            layout="speculators",
            draft_vocab=100,
            markov="vanilla",
            confidence=True,
            settings={"sample_from_anchor": False},
        )
    ),
}


def causal_of(case: Case) -> bool:
    return all(case.causal)


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_formulas(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    witness = target_at(tmp_path)
    file = write_block_gguf(tmp_path / "h.gguf", case.head, first=case.first, causal=causal_of(case))
    drafter = load_head(file, witness)
    sparks = case.head.markov is not None or case.first
    assert drafter.name == ("dspark" if sparks else "dflash")
    assert drafter.model.config.slots == case.head.block - (not case.first)
    oracle = oracle_for(case, case.head.write(tmp_path / "head"), witness)
    planner = Checked(drafter, oracle, witness, 4)
    done = run(Engine(target_at(tmp_path), TOKENIZER), PROMPT, greedy(16), planner)
    same(run(Engine(target_at(tmp_path), TOKENIZER), PROMPT, greedy(16)), done)
    assert planner.agreed >= 5


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_the_folder(name: str, tmp_path: Path) -> None:
    """One network, two files: nothing is lost or turned on the way."""
    case, target = CASES[name], target_at(tmp_path)
    file = write_block_gguf(tmp_path / "h.gguf", case.head, first=case.first, causal=causal_of(case))
    drafters = [load_head(path, target) for path in (file, case.head.write(tmp_path / "head"))]
    assert drafters[0].layers == drafters[1].layers
    states = np.concatenate(random_states(40, 2), axis=1)
    table = np.arange(8, dtype=np.int32)
    found = []
    for drafter in drafters:
        drafter.model.file(states, 0, table)
        (logits,), (hidden,) = drafter.model.speak([Block(7, 40, table, drafter.model.config.slots)])
        found.append(logits.copy())
        if case.head.confidence is not None:
            found[-1] = np.append(found[-1], drafter._heads.open(hidden, 7).sure())
    np.testing.assert_array_equal(*found)


def test_types_of_a_file_stay_and_formulas_hold_nearly(tmp_path: Path) -> None:
    head = TinyHead(layout="deepspec", own=True, markov="vanilla", confidence=True)
    plain = write_block_gguf(tmp_path / "plain.gguf", head, first=True)
    kept = open_checkpoint(plain)
    packed = {}
    for name, info in kept.tensors.items():
        if len(info.shape) == 2 and name.startswith("blk."):
            packed[name] = Tensor(int(info.type), info.shape, kept.data(name).tobytes())
    file = write_block_gguf(tmp_path / "packed.gguf", head, first=True, more=packed)
    found = open_checkpoint(file)
    assert {found.tensors[name].type.name for name in packed} == {"Q8_0"}
    target = target_at(tmp_path)
    case = Case(head, first=True)
    oracle = oracle_for(case, head.write(tmp_path / "head"), target)
    drafter = load_head(file, target, dtype="auto")
    states = random_states(40, 2)
    wanted = oracle.say(oracle.features(wide(states)), 3, 1)
    drafter.model.file(np.concatenate(states, axis=1), 0, np.arange(8, dtype=np.int32))
    (logits,), _ = drafter.model.speak([Block(3, 40, np.arange(8, dtype=np.int32), 1)])
    bias = drafter.model.bias(drafter._heads.open(np.zeros((1, 64), np.float32), 3).latent()[None])
    assert furthest(logits + bias, wanted.logits) < 0.1


SPARK = TinyHead(layout="deepspec", own=True, markov="vanilla", confidence=True)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"keys": {"target_layers": GONE}}, "the file has no target_layers"),
    "layers too deep": ({"keys": {"target_layers": [1, 5]}}, "a target that has 4"),
    "no mask": ({"keys": {"tokenizer.ggml.mask_token_id": GONE}}, "the file has no mask_token_id"),
    "no block": ({"keys": {"block_size": GONE}}, "the file has no block_size"),
    "no vocabulary": ({"keys": {"tokenizer.ggml.tokens": GONE}}, "the file has no vocab_size"),
    "another vocabulary": ({"keys": {"vocab_size": 300}}, "knows 300 tokens, the target 262"),
    "anchors": ({"keys": {"sample_from_anchor": "yes"}}, "sample_from_anchor = yes, not true or false"),
    "a window for nobody": ({"keys": {"attention.sliding_window": 4}}, "no pattern of the layers"),
    "a pattern too short": (
        {"keys": {"attention.sliding_window": 4, "attention.sliding_window_pattern": [True]}},
        "layer_types are not 2 names",
    ),
    "DFlash2": ({"keys": {"conv_kernel_size": 2}}, "DFlash2"),
    "DFlash2's tensors": ({"more": {"selector_hidden.weight": Tensor.of(np.ones((32, 64)))}}, "DFlash2"),
    "DeepSeek-V4": ({"keys": {"hyper_connection_count": 4}}, "the module inside DeepSeek-V4"),
    "sinks": ({"more": {"blk.0.attn_sinks.weight": Tensor.of(np.ones(4))}}, "attention sinks"),
    "scaled logits": ({"keys": {"logit_scale": 0.5}}, "logit_scale = 0.5"),
    "scaled embeddings": ({"keys": {"embedding_scale": 8.0}}, "embedding_scale = 8.0"),
    "activation": ({"keys": {"hidden_activation": "gelu"}}, "hidden_activation = 'gelu'"),
    "sections": ({"keys": {"rope.dimension_sections": [8, 4, 4, 0]}}, "rope of several sections"),
    "a tensor too many": ({"more": {"blk.0.extra.weight": Tensor.of(np.ones(4))}}, "blk.0.extra"),
    "a tensor too few": ({"without": ("blk.1.ffn_up.weight",)}, "ffn_up"),
    "no hidden norm": ({"without": ("enc.output_norm.weight",)}, "hidden_norm"),
    "half a Markov head": ({"without": ("markov_w2.weight",)}, "markov_w2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_rightly_is_refused(name: str, tmp_path: Path) -> None:
    how, message = REFUSED[name]
    with pytest.raises(PacelineError, match=message) as raised:
        load_head(write_block_gguf(tmp_path / "h.gguf", SPARK, first=True, **how), target_at(tmp_path))
    assert raised.value.hint


def test_keys_that_change_nothing_are_no_hindrance(tmp_path: Path) -> None:
    keys = {
        "logit_scale": 1.0,
        "embedding_scale": 0.0,
        "hidden_activation": "silu",
        "rope.dimension_sections": [16, 0, 0, 0],
        "attention.causal": False,
    }
    file = write_block_gguf(tmp_path / "h.gguf", SPARK, first=True, keys=keys)
    assert load_head(file, target_at(tmp_path)).model.config.slots == 5


def test_what_the_file_does_not_say_is_as_in_llama_cpp(tmp_path: Path) -> None:
    """Without sample_from_anchor a Markov head predicts from the anchor's slot on, plain DFlash does not."""
    target = target_at(tmp_path)
    plain = replace(SPARK, markov=None, confidence=None)
    for head, first in ((SPARK, True), (plain, False)):
        file = write_block_gguf(tmp_path / "h.gguf", head, first=True, keys={"sample_from_anchor": GONE})
        assert load_head(file, target).model.config.anchor_first is first
    bare = write_block_gguf(tmp_path / "h.gguf", SPARK, first=True, without=("conf_proj.bias",))
    heads = load_head(bare, target)._heads
    assert heads.sure is not None
    np.testing.assert_array_equal(heads.sure.bias, [0.0])


def test_an_offset_map_is_refused(tmp_path: Path) -> None:
    head = TinyHead(layout="speculators", draft_vocab=100)
    offsets = {"d2t": Tensor.ids(head.mapping()["d2t"])}
    file = write_block_gguf(tmp_path / "h.gguf", head, first=False, more=offsets)
    with pytest.raises(PacelineError, match="d2t holds offsets where ids are customary"):
        load_head(file, target_at(tmp_path))


def test_blocks_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    keys = {"general.architecture": "qwen2", "qwen2.block_count": 2, "qwen2.nextn_predict_layers": 2}
    file = write_gguf(tmp_path / "m.gguf", keys, {"blk.0.attn_norm.weight": Tensor.of(np.ones(8))})
    with pytest.raises(PacelineError, match="2 of 2 blocks are heads"):
        open_checkpoint(file)
    bare = write_gguf(tmp_path / "b.gguf", {"general.architecture": "dspark"}, {})
    with pytest.raises(UnsupportedModelError, match="no head that drafts"):
        open_checkpoint(bare)
