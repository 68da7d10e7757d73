"""Block drafters against their formulas in float64, through every layout and every turn a cache can take."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core import Context, Prices, SamplingParams
from paceline.drafters.dflash import BlockDrafter
from paceline.drafters.dflash_model import Block
from paceline.engine.engine import Engine
from paceline.errors import ModelFileError, PacelineError, UnsupportedModelError
from paceline.sampling.sampler import Sampler
from paceline.tools.profile import rows_at
from support.block_cases import (
    MODEL,
    PROMPT,
    Case,
    Checked,
    Small,
    checked,
    furthest,
    greedy,
    heard,
    load_head,
    oracle_for,
    random_params,
    random_states,
    target_at,
    wide,
)
from support.block_heads import GONE, BlockOracle, TinyHead
from support.engines import TOKENIZER, finish, run, same, submit
from support.planners import FixedPlanner

Array = NDArray[Any]


CASES = {
    "z-lab": Case(TinyHead()),
    "z-lab last layer": Case(TinyHead(taps=(1, 3), block=8)),
    "z-lab one layer": Case(TinyHead(layers=1, taps=(0, 1, 2)), causal=(False,)),
    "llama layers": Case(TinyHead(head_norms=False)),
    "biases": Case(TinyHead(biases=True, head_norms=False)),
    "another rope": Case(TinyHead(theta=1e6)),
    "specforge": Case(TinyHead(layout="specforge", block=16)),
    "specforge windows": Case(TinyHead(layout="specforge", sliding=(0,)), causal=(True, False)),
    "windows last": Case(TinyHead(layout="specforge", sliding=(1,), window=2), causal=(False, True)),
    "windows, not causal": Case(TinyHead(sliding=(0, 1), settings={"is_causal": False})),
    "not causal inside": Case(TinyHead(sliding=(0, 1), nested={"causal": False})),
    "causal": Case(TinyHead(settings={"is_causal": True}), causal=(True, True)),
    "speculators": Case(TinyHead(layout="speculators", draft_vocab=100)),
    "speculators own": Case(TinyHead(layout="speculators", own=True, sliding=(1,)), causal=(False, True)),
    "speculators wide windows": Case(
        TinyHead(layout="speculators", sliding=(0, 1), settings={"sliding_window_non_causal": True})
    ),
    "speculators anchor": Case(
        TinyHead(layout="speculators", own=True, settings={"sample_from_anchor": True}), first=True
    ),
    "deepspec without Markov": Case(TinyHead(layout="deepspec", own=True), first=True),
}


def speak(drafter: BlockDrafter, states: Sequence[Array], anchor: int, parts: Sequence[int] = ()) -> Array:
    """[slots, V] logits of a block behind these states, filed in parts that end there."""
    model = drafter.model
    both, table = np.concatenate(states, axis=1), np.arange(8, dtype=np.int32)
    ends = [*parts, len(both)]
    for start, end in zip([0, *ends], ends, strict=False):
        if end > start:
            model.file(np.ascontiguousarray(both[start:end]), start, table)
    (logits,), _ = model.speak([Block(anchor, len(both), table, model.config.slots)])
    if model.places is None:
        return logits
    whole = np.full((len(logits), MODEL.vocab), -np.inf, np.float32)
    whole[:, model.places] = logits
    return whole


@pytest.mark.parametrize("name", CASES)
def test_every_layout_computes_what_its_formulas_say(name: str, tmp_path: Path) -> None:
    case, target = CASES[name], target_at(tmp_path)
    path = case.head.write(tmp_path / "head")
    drafter, oracle = load_head(path, target), oracle_for(case, path, target)
    for count, parts in ((1, ()), (31, (5, 6)), (32, (32,)), (70, (64,))):
        states = random_states(count, len(case.head.taps), seed=count)
        wanted = oracle.say(oracle.features(wide(states)), 17 + count, drafter.model.config.slots)
        found = speak(drafter, states, 17 + count, parts)
        assert len(found) == case.head.block - (0 if case.first else 1)
        assert furthest(found, wanted.logits) < 2e-3
        assert found.argmax(axis=1).tolist() == wanted.tokens


def test_a_head_in_bf16_is_near_its_formulas_and_in_q8_not_far(tmp_path: Path) -> None:
    case, target = Case(TinyHead(dtype="BF16")), target_at(tmp_path)
    path = case.head.write(tmp_path / "head")
    states = random_states(40, 2)
    oracle = oracle_for(case, path, target)
    wanted = oracle.say(oracle.features(wide(states)), 3, 4)
    for dtype, bound in (("f32", 2e-3), ("bf16", 3e-2), ("q8", 0.1)):
        found = speak(load_head(path, target, dtype=dtype), states, 3)
        assert furthest(found, wanted.logits) < bound


def test_a_block_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """Several requests in one pass, each with a context of its own length: the same bits as alone."""
    drafter = load_head(TinyHead(sliding=(0,)).write(tmp_path / "head"), target_at(tmp_path))
    model = drafter.model
    tables = [np.arange(4 * i, 4 * i + 4, dtype=np.int32) for i in range(3)]
    blocks = []
    for i, (count, slots) in enumerate(((40, 4), (3, 1), (95, 3))):
        model.file(np.concatenate(random_states(count, 2, seed=i), axis=1), 0, tables[i])
        blocks.append(Block(20 + i, count, tables[i], slots))
    together = [logits.copy() for logits in model.speak(blocks)[0]]
    for block, found in zip(blocks, together, strict=True):
        assert found.shape == (block.slots, MODEL.vocab)
        np.testing.assert_array_equal(model.speak([block])[0][0], found)


def test_blocks_leave_no_trace(tmp_path: Path) -> None:
    drafter = load_head(TinyHead().write(tmp_path / "head"), target_at(tmp_path))
    states = random_states(50, 2)
    first = speak(drafter, states, 9).copy()
    for anchor in range(100, 120):
        drafter.model.speak([Block(anchor, 30, np.arange(8, dtype=np.int32), 4)])
    both = np.concatenate(states, axis=1)
    drafter.model.file(np.ascontiguousarray(both[30:]), 30, np.arange(8, dtype=np.int32))
    again, _ = drafter.model.speak([Block(9, 50, np.arange(8, dtype=np.int32), 4)])
    np.testing.assert_array_equal(again[0], first)


# --- what the engine does with it ---


@pytest.mark.parametrize(
    "name", ["z-lab", "z-lab last layer", "specforge windows", "speculators", "speculators anchor"]
)
def test_what_is_drafted_follows_from_the_text_alone(name: str, tmp_path: Path) -> None:
    """Layers, positions and the anchor are right in every step: the oracle knows only the text so far."""
    planner = checked(CASES[name], tmp_path, 3)
    done = run(Engine(target_at(tmp_path), TOKENIZER), PROMPT, greedy(30), planner)
    same(run(Engine(target_at(tmp_path), TOKENIZER), PROMPT, greedy(30)), done)
    assert planner.agreed >= 10
    assert set(planner.known.values()) == {0}


@pytest.mark.parametrize("name", ["specforge windows", "windows, not causal"])
def test_layers_with_a_window_keep_pages_for_that_and_a_block(name: str, tmp_path: Path) -> None:
    """And draft as if all were kept, which the oracle does."""
    planner = checked(CASES[name], tmp_path, 3)
    drafter = planner.drafter
    assert isinstance(drafter, BlockDrafter)
    engine = Engine(target_at(tmp_path), TOKENIZER)
    request = submit(engine, PROMPT, greedy(80), planner)
    while not request.over:
        engine.step()
        for seat in drafter._seats.values():
            sequence = seat.track.sequence
            assert sequence is None or sequence._near is not None
            assert sequence is None or sum(sequence._near.held) <= 2  # type: ignore[union-attr]
    assert finish(engine, request)[0].tokens == run(engine, PROMPT, greedy(80)).tokens
    assert planner.agreed >= 20


def test_an_error_of_one_shows(tmp_path: Path) -> None:
    """In the layers read, in the context's end, in its order, in the slot that predicts: other tokens."""
    case = CASES["z-lab"]
    planner = checked(case, tmp_path, 4)
    drafter, oracle = planner.drafter, planner.oracle
    assert isinstance(drafter, BlockDrafter)
    right, wrong = 0, [0] * 5
    for start in range(20):
        tokens = [*PROMPT[start:], *PROMPT[:start]][:6]
        wanted = planner.expected(drafter, tokens, 0, 4)
        context = Context(start, tokens, len(tokens))
        rows = rows_at(planner.witness, 0, 5, 1)
        rows.tokens = np.asarray(tokens[:-1], np.int32)
        planner.witness.listen(range(5))
        hidden = {layer: h.copy() for layer, h in planner.witness.forward(rows).hidden.items()}
        drafter.hear(context, 0, hidden)
        right += drafter.propose(context, 4).tokens == wanted
        states = {layer: h.astype(np.float64) for layer, h in hidden.items()}
        one, two = drafter.model.config.taps

        def said(oracle: BlockOracle, low: Array, high: Array, anchor: int) -> list[int]:
            return oracle.say(oracle.features([low, high]), anchor, 4).tokens

        shifted = BlockOracle.__new__(BlockOracle)
        shifted.__dict__ = {**oracle.__dict__, "first": True}
        wrong[0] += said(oracle, states[one + 1], states[two + 1], tokens[-1]) == wanted
        wrong[1] += said(oracle, states[one - 1], states[two - 1], tokens[-1]) == wanted
        wrong[2] += said(oracle, states[one][:-1], states[two][:-1], tokens[-1]) == wanted
        wrong[3] += said(oracle, states[two], states[one], tokens[-1]) == wanted
        wrong[4] += said(shifted, states[one], states[two], tokens[-1]) == wanted
    assert right == 20
    assert max(wrong) <= 5


def test_layers_can_be_told(tmp_path: Path) -> None:
    """A checkpoint that counts otherwise than its format says can be tried one layer off."""
    path = TinyHead().write(tmp_path / "head")
    drafter = load_head(path, target_at(tmp_path), layers=(2, 4))
    assert drafter.layers == (2, 4)
    with pytest.raises(ModelFileError, match=r"fc\.weight"):
        load_head(path, target_at(tmp_path), layers=(2, 3, 4))


def test_texts_share_what_is_filed_and_their_room(tmp_path: Path) -> None:
    """Requests with one prompt, among them one that comes back, with room for about two in the cache."""
    case = CASES["z-lab"]
    witness = target_at(tmp_path)
    path = case.head.write(tmp_path / "head")
    drafter = load_head(path, Small(witness, pages=-8))  # 8 pages of 32 in all
    planner = Checked(drafter, oracle_for(case, path, witness), witness, 3)
    engine = Engine(target_at(tmp_path), TOKENIZER)
    prompts = [PROMPT, [*PROMPT[:60], 9, 9, 9], PROMPT[::-1], PROMPT]
    for prompt in prompts:
        same(
            run(Engine(target_at(tmp_path), TOKENIZER), prompt, greedy(12)),
            run(engine, prompt, greedy(12), planner),
        )
    requests = [submit(engine, prompt, greedy(12), planner) for prompt in prompts]
    finish(engine, *requests)
    assert planner.agreed > 20
    assert drafter._seats == {}
    assert drafter.cache.kv.available == drafter.cache.kv.pages


def test_behind_a_gap_it_sees_what_it_heard(tmp_path: Path) -> None:
    """A prefix that the target had cached before the drafter came is not heard; positions count on."""
    engine = Engine(target_at(tmp_path), TOKENIZER)
    run(engine, PROMPT, greedy(3))
    planner = checked(CASES["z-lab"], tmp_path, 3)
    done = run(engine, [*PROMPT, 5, 6], greedy(20), planner)
    assert done.cached_tokens > 0
    assert set(planner.known.values()) == {done.cached_tokens}
    assert planner.agreed >= 5
    same(run(Engine(target_at(tmp_path), TOKENIZER), [*PROMPT, 5, 6], greedy(20)), done)


@pytest.mark.parametrize("name", ["z-lab", "specforge windows", "speculators", "deepspec without Markov"])
def test_random_batches_equal_plain_decoding(name: str, tmp_path: Path) -> None:
    """Any mix of requests, preempted, with prefixes cached and a drafter that runs out of room."""
    rng = random.Random(name)
    path = CASES[name].head.write(tmp_path / "head")
    for _ in range(6):
        drafter = load_head(path, Small(target_at(tmp_path), rng.choice([-12, -8, 20])), dtype="q8")
        engine = Engine(target_at(tmp_path, max_model_len=160, pages=rng.choice([6, 9, 30])), TOKENIZER)
        prompts = [[*PROMPT[: rng.choice([1, 20, 64, 70])], rng.randrange(250)] for _ in range(4)]
        params = [random_params(rng) for _ in range(4)]
        requests = [
            submit(engine, prompt, its, FixedPlanner(drafter, rng.choice([1, 3, 8])))
            for prompt, its in zip(prompts, params, strict=True)
        ]
        for prompt, its, done in zip(prompts, params, finish(engine, *requests), strict=True):
            same(run(Engine(target_at(tmp_path), TOKENIZER), prompt, its), done)
        assert drafter.broken is None
        assert drafter._seats == {}


def test_shared_noise_draws_what_the_draft_itself_would_draw(tmp_path: Path) -> None:
    """At a temperature a slot's token is the request's own draw from the slot's logits."""
    drafter = load_head(TinyHead().write(tmp_path / "head"), target_at(tmp_path))
    params = SamplingParams(temperature=0.9, seed=11)
    tokens = PROMPT[:40]
    context = Context(1, tokens, len(tokens), params=params, seed=11)
    states = random_states(39, 2)
    drafter.hear(context, 0, dict(zip(drafter.layers, states, strict=True)))
    draft = drafter.propose(context, 4)
    logits = speak(load_head(tmp_path / "head", target_at(tmp_path)), states, tokens[-1])
    sampler = Sampler(params, tokens, frozenset(), MODEL.vocab, 11)
    drawn = [sampler.pick(row, int(row.argmax()), 40 + i) for i, row in enumerate(logits)]
    assert draft.tokens == drawn


# --- prices, chances, failures ---


def test_a_block_is_made_where_it_pays(tmp_path: Path) -> None:
    drafter = load_head(TinyHead(block=8).write(tmp_path / "head"), target_at(tmp_path))
    contexts = [heard(drafter, i) for i in range(3)]
    cheap = Prices(plain=1.0, tokens=3.0, extra=[0.001 * n for n in range(60)])
    drafts = drafter.propose_many(contexts, [7, 7, 0], cheap)
    assert [len(draft) > 0 for draft in drafts] == [True, True, False]
    dear = Prices(plain=1e-4, tokens=3.0, extra=[0.001 * n for n in range(60)])
    assert [len(d) for d in drafter.propose_many(contexts, [7, 7, 7], dear)] == [0, 0, 0]
    assert drafter.price(contexts[0]) == drafter.costs.cost(8)


def test_chances_are_learnt(tmp_path: Path) -> None:
    """Guesses that always come true are soon sure, others soon hopeless."""
    path = TinyHead().write(tmp_path / "head")
    chances = []
    for truth in (True, False):
        drafter = load_head(path, target_at(tmp_path))
        for turn in range(60):
            context = heard(drafter, turn % 30)
            draft = drafter.propose(context, 4)
            written = draft.tokens if truth else [draft.tokens[0] ^ 1]
            context.tokens = [*context.tokens, *written]
            drafter.commit(context, None)
            drafter.forget(context)
        chances.append(drafter.propose(heard(drafter, 33), 4).chances)
    assert min(chances[0]) > 0.7
    assert chances[1][0] < 0.15


@pytest.mark.parametrize("failing", ["speak", "file"])
def test_numbers_that_overflow_end_the_drafting_and_harm_nobody(
    failing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = load_head(TinyHead().write(tmp_path / "head"), target_at(tmp_path))

    def fail(*_: Any) -> Any:
        raise ModelFileError("its numbers overflow")

    monkeypatch.setattr(drafter.model, failing, fail)
    done = run(Engine(target_at(tmp_path), TOKENIZER), PROMPT, greedy(9), FixedPlanner(drafter, 3))
    same(run(Engine(target_at(tmp_path), TOKENIZER), PROMPT, greedy(9)), done)
    assert drafter.broken is not None
    assert done.speculation.drafted == 0
    assert "stays off" in caplog.text


def test_without_states_nothing_is_drafted(tmp_path: Path) -> None:
    drafter = load_head(TinyHead().write(tmp_path / "head"), target_at(tmp_path))
    assert len(drafter.propose(Context(1, PROMPT, 75), 4)) == 0
    context = heard(drafter, 2)
    context.tokens = [*context.tokens, 1]  # a token more than was heard of
    assert len(drafter.propose(context, 4)) == 0


# --- what is refused ---

REFUSED: dict[str, tuple[TinyHead, str]] = {
    "no layers": (TinyHead(nested={"target_layer_ids": GONE}), "no target_layer_ids"),
    "no layers, speculators": (
        TinyHead(layout="speculators", settings={"aux_hidden_state_layer_ids": GONE}),
        "no aux_hidden_state_layer_ids",
    ),
    "no mask": (TinyHead(nested={"mask_token_id": GONE}), "no mask_token_id"),
    "no block": (TinyHead(settings={"block_size": GONE}), "no block_size"),
    "block of one": (TinyHead(settings={"block_size": 1}), "block_size = 1"),
    "block too long": (TinyHead(settings={"block_size": 65}), "65 slots"),
    "mask outside": (TinyHead(nested={"mask_token_id": 262}), "mask_token_id is 262, of 262"),
    "mask text": (TinyHead(nested={"mask_token_id": "x"}), "mask_token_id = x"),
    "layers unordered": (TinyHead(nested={"target_layer_ids": [2, 0]}), "do not ascend"),
    "layers too deep": (TinyHead(nested={"target_layer_ids": [0, 4]}), "a target that has 4"),
    "layers no list": (TinyHead(nested={"target_layer_ids": 3}), "target_layer_ids = 3"),
    "another depth": (TinyHead(target_layers=36), "36 layers; this one has 4"),
    "another count": (TinyHead(nested={"target_layer_ids": [0, 1, 2]}), "192 wide"),
    "another width": (TinyHead(width=96), "96"),
    "another vocabulary": (TinyHead(vocab=260, settings={"vocab_size": 260}), "260 tokens, the target 262"),
    "layer kinds": (TinyHead(settings={"layer_types": ["full_attention", "mamba"]}), "mamba"),
    "layer count": (TinyHead(settings={"layer_types": ["full_attention"]}), "layer_types"),
    "no window": (TinyHead(sliding=(0,), settings={"sliding_window": GONE}), "sliding_window is None"),
    "a narrow window": (TinyHead(sliding=(0,), window=4, settings={"is_causal": False}), "both ways"),
    "activation": (TinyHead(settings={"hidden_act": "gelu"}), "gelu"),
    "latent attention": (TinyHead(layout="specforge", nested={"attention_mode": "mla"}), "mla"),
    "sinks": (TinyHead(nested={"attention_sink_bias": True}), "attention_sink_bias"),
    "multiplier": (TinyHead(nested={"output_multiplier": 0.5}), "output_multiplier"),
    "domino": (TinyHead(layout="specforge", nested={"projector_type": "domino"}), "domino"),
    "Laguna": (TinyHead(settings={"architectures": ["DFlashLagunaForCausalLM"]}), "Laguna"),
    "DFlash2": (TinyHead(settings={"architectures": ["DFlash2DraftModel"]}), "DFlash2"),
    "not a flag": (TinyHead(settings={"is_causal": "yes"}), "is_causal = yes"),
    "inner": (TinyHead(settings={"dflash_config": 7}), "dflash_config is 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_rightly_is_refused(name: str, tmp_path: Path) -> None:
    head, message = REFUSED[name]
    with pytest.raises(PacelineError, match=message) as raised:
        load_head(head.write(tmp_path / "head"), target_at(tmp_path))
    assert raised.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fc.weight", "infinite"),
        ("layers.1.mlp.up_proj.weight", "infinite"),
        ("norm.weight", "infinite"),
        ("-hidden_norm.weight", "hidden_norm.weight"),
        ("-layers.1.mlp.up_proj.weight", "ffn_up"),
        ("+layers.0.self_attn.sinks", "sinks"),
        ("+layers.0.input_layernorm.bias", "attn_norm.bias"),
        ("+layers.0.attention_conv.base_kernel", "attention_conv"),
    ],
)
@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_damaged_and_unknown_weights_are_refused(
    change: str, message: str, dtype: str, tmp_path: Path
) -> None:
    head = TinyHead()
    arrays = head.arrays()
    if change[0] == "-":
        del arrays[change[1:]]
    elif change[0] == "+":
        arrays[change[1:]] = np.ones(head.width, np.float32)
    else:
        arrays[change].reshape(-1)[3] = np.nan
    with pytest.raises((ModelFileError, UnsupportedModelError), match=message):
        load_head(head.write(tmp_path / "head", arrays), target_at(tmp_path), dtype=dtype)


def test_a_mask_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    path = TinyHead().write(tmp_path / "head")
    (path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="mask_embedding"):
        load_head(path, target_at(tmp_path))


def test_a_reduced_vocabulary_needs_its_map(tmp_path: Path) -> None:
    head = TinyHead(layout="speculators", draft_vocab=100)
    path = head.write(tmp_path / "head")
    ids = load_head(path, target_at(tmp_path)).model.places
    assert ids is not None
    assert ids.tolist() == np.flatnonzero(head.mapping()["t2d"]).tolist()

    class Unmapped(TinyHead):
        def mapping(self) -> dict[str, Array]:
            return {}

    bare = Unmapped(**head.__dict__)
    with pytest.raises(ModelFileError, match="d2t"):
        load_head(bare.write(tmp_path / "bare"), target_at(tmp_path))


def test_settings_of_both_conventions_agree(tmp_path: Path) -> None:
    """What z-lab calls layer 0's output speculators calls layer 1's input."""
    one = load_head(TinyHead(taps=(0, 2)).write(tmp_path / "one"), target_at(tmp_path))
    other = TinyHead(layout="speculators", taps=(0, 2)).write(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert load_head(other, target_at(tmp_path)).layers == one.layers == (1, 3)


def test_the_whole_draft_stays_within_its_budget_and_block(tmp_path: Path) -> None:
    drafter = load_head(replace(TinyHead(), block=5).write(tmp_path / "head"), target_at(tmp_path))
    assert [len(drafter.propose(heard(drafter, i), budget)) for i, budget in enumerate((0, 1, 3, 9))] == [
        0,
        1,
        3,
        4,
    ]
