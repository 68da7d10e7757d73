"""Markov and confidence heads against their formulas in float64, in both block layouts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core import Context, Prices, SamplingParams
from paceline.drafters.dflash import BlockDrafter
from paceline.drafters.dflash_model import Block
from paceline.engine.engine import Engine
from paceline.errors import PacelineError, UsageError
from paceline.sampling.sampler import Sampler
from support.block_cases import (
    MODEL,
    PROMPT,
    Case,
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
from support.block_heads import GONE, TinyHead
from support.engines import TOKENIZER, finish, run, same, submit
from support.planners import FixedPlanner

Array = NDArray[Any]

CASES = {
    "deepspec vanilla": Case(
        TinyHead(layout="deepspec", own=True, markov="vanilla", confidence=True), first=True
    ),
    "deepspec gated": Case(
        TinyHead(layout="deepspec", own=True, markov="gated", confidence=False), first=True
    ),
    "deepspec rnn": Case(TinyHead(layout="deepspec", own=True, markov="rnn", rank=64), first=True),
    "deepspec, only sure": Case(TinyHead(layout="deepspec", own=True, confidence=False), first=True),
    "specforge": Case(TinyHead(layout="specforge", markov="vanilla", confidence=True, block=7), first=True),
    "specforge windows": Case(
        TinyHead(layout="specforge", markov="rnn", confidence=True, sliding=(0,)),
        first=True,
        causal=(True, False),
    ),
    "speculators": Case(
        TinyHead(layout="speculators", markov="gated", confidence=True, draft_vocab=90), first=True
    ),
    "speculators bonus": Case(
        TinyHead(layout="speculators", markov="rnn", confidence=True, settings={"sample_from_anchor": False})
    ),
    "bonus by another name": Case(
        TinyHead(layout="specforge", markov="vanilla", settings={"dspark_bonus_anchor": True})
    ),
}


def written(drafter: BlockDrafter, states: list[Array], anchor: int) -> tuple[list[int], Array, list[float]]:
    """Tokens, logits under the target's ids, and confidences, through the heads' own steps."""
    model, both = drafter.model, np.concatenate(states, axis=1)
    table = np.arange(8, dtype=np.int32)
    model.file(both, 0, table)
    (logits,), (hidden,) = model.speak([Block(anchor, len(both), table, model.config.slots)])
    chain = drafter._heads.open(hidden, anchor)
    tokens: list[int] = []
    rows, sure = [], []
    for row in logits:
        if model.config.markov is not None:
            row = row + model.bias(chain.latent()[None])[0]
        whole = np.full(MODEL.vocab, -np.inf, np.float32)
        whole[slice(None) if model.places is None else model.places] = row
        sure.append(chain.sure())
        tokens.append(int(whole.argmax()))
        rows.append(whole)
        chain.follow(tokens[-1])
    return tokens, np.array(rows), [one for one in sure if one is not None]


@pytest.mark.parametrize("name", CASES)
def test_every_head_computes_what_its_formulas_say(name: str, tmp_path: Path) -> None:
    case, target = CASES[name], target_at(tmp_path)
    path = case.head.write(tmp_path / "head")
    drafter, oracle = load_head(path, target), oracle_for(case, path, target)
    assert drafter.name == "dspark"
    for count in (1, 40):
        states = random_states(count, 2, seed=count)
        slots = drafter.model.config.slots
        wanted = oracle.say(oracle.features(wide(states)), 30 + count, slots)
        tokens, logits, sure = written(drafter, states, 30 + count)
        assert slots == case.head.block - (not case.first)
        assert furthest(logits, wanted.logits) < 2e-3
        assert tokens == wanted.tokens
        if case.head.confidence is not None:
            np.testing.assert_allclose(sure, wanted.sure, atol=2e-3)


@pytest.mark.parametrize(
    "name", ["deepspec vanilla", "deepspec gated", "specforge windows", "speculators bonus"]
)
def test_what_is_drafted_follows_from_the_text_alone(name: str, tmp_path: Path) -> None:
    """Layers, positions, anchor and the chain of tokens are right in every step."""
    planner = checked(CASES[name], tmp_path, 4)
    done = run(Engine(target_at(tmp_path), TOKENIZER), PROMPT, greedy(24), planner)
    same(run(Engine(target_at(tmp_path), TOKENIZER), PROMPT, greedy(24)), done)
    assert planner.agreed >= 8


def test_requests_draft_together_as_alone(tmp_path: Path) -> None:
    drafter = load_head(CASES["deepspec rnn"].head.write(tmp_path / "head"), target_at(tmp_path))
    contexts = [heard(drafter, i) for i in range(4)]
    alone = [drafter.propose(context, n).tokens for context, n in zip(contexts, (5, 1, 3, 2), strict=True)]
    together = drafter.propose_many(contexts, [5, 1, 3, 2], None)
    assert [draft.tokens for draft in together] == alone
    assert [len(one) for one in alone] == [5, 1, 3, 2]


def test_the_other_reading_of_the_block_drafts_other_tokens(tmp_path: Path) -> None:
    """Which slot predicts what raises no error when it is wrong: only the tokens show it."""
    said = {"sample_from_anchor": GONE}
    head = TinyHead(layout="speculators", own=True, markov="vanilla", settings=said)
    path = head.write(tmp_path / "head")
    with pytest.raises(PacelineError, match="no sample_from_anchor"):
        load_head(path, target_at(tmp_path))
    first, bonus = (load_head(path, target_at(tmp_path), sample_from_anchor=told) for told in (True, False))
    assert (first.model.config.slots, bonus.model.config.slots) == (5, 4)
    drafts = [[d.propose(heard(d, i), 4).tokens for i in range(10)] for d in (first, bonus)]
    assert sum(one == other for one, other in zip(*drafts, strict=True)) <= 2
    written_so = TinyHead(**{**head.__dict__, "settings": {"sample_from_anchor": True}}).write(
        tmp_path / "so"
    )
    again = load_head(written_so, target_at(tmp_path))
    assert [again.propose(heard(again, i), 4).tokens for i in range(10)] == drafts[0]


def test_at_a_temperature_each_token_leads_to_the_next(tmp_path: Path) -> None:
    """The request's own draw from a slot's logits, which depend on the token drawn before it."""
    target = target_at(tmp_path)
    case = CASES["deepspec vanilla"]
    path = case.head.write(tmp_path / "head")
    drafter, oracle = load_head(path, target), oracle_for(case, path, target)
    params = SamplingParams(temperature=0.9, seed=11)
    tokens, states = PROMPT[:40], random_states(39, 2)
    context = Context(1, tokens, 40, params=params, seed=11)
    drafter.hear(context, 0, dict(zip(drafter.layers, states, strict=True)))
    draft = drafter.propose(context, 5)
    sampler = Sampler(params, tokens, frozenset(), MODEL.vocab, 11)
    hidden = oracle.hidden(oracle.features(wide(states)), tokens[-1])
    before = tokens[-1]
    for i, (h, token) in enumerate(zip(hidden, draft.tokens, strict=True)):
        bias, _, _ = oracle._bias(h, before, np.zeros(0))
        row = (h @ oracle.head.T + bias).astype(np.float32)
        assert token == sampler.pick(row, int(row.argmax()), 40 + i)
        before = token


def test_a_draft_ends_where_the_heads_doubt_makes_it_not_worth_more(tmp_path: Path) -> None:
    """The same block, sure of itself and not: chances follow the confidence head, and so does the length."""
    head = TinyHead(layout="deepspec", own=True, markov="vanilla", confidence=True, block=8)
    drafts = []
    for bias in (6.0, -3.0):
        arrays = head.arrays()
        arrays["confidence_head.proj.weight"][:] *= 0.01
        arrays["confidence_head.proj.bias"][:] = bias
        drafter = load_head(head.write(tmp_path / f"head{bias}", arrays), target_at(tmp_path))
        prices = Prices(plain=1.0, tokens=1.0, extra=[0.3 * n for n in range(20)])
        drafts.append(drafter.propose_many([heard(drafter, 1)], [8], prices)[0])
        (whole,) = drafter.propose_many([heard(drafter, 2)], [8], None)
        assert len(whole) == 8
        assert min(whole.chances) > 0.9 if bias > 0 else max(whole.chances) < 0.2
    assert len(drafts[0]) >= 4 > len(drafts[1])
    np.testing.assert_array_equal(drafts[0].tokens[: len(drafts[1])], drafts[1].tokens)


@pytest.mark.parametrize("name", ["deepspec gated", "specforge windows", "speculators"])
def test_random_batches_equal_plain_decoding(name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    path = CASES[name].head.write(tmp_path / "head")
    for _ in range(5):
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


MARKOV = TinyHead(layout="deepspec", own=True, markov="gated", confidence=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("markov_head.markov_w1.weight", "infinite"),
        ("markov_head.markov_w2.weight", "infinite"),
        ("markov_head.gate_proj.bias", "infinite"),
        ("confidence_head.proj.weight", "infinite"),
        ("-markov_head.markov_w1.weight", "markov_w1"),
        ("-markov_head.markov_w2.weight", "markov_w2"),
        ("-markov_head.gate_proj.weight", "'gated', the weights are of a vanilla one"),
        ("-markov_head.gate_proj.bias", "gate_proj.bias"),
        ("-confidence_head.proj.bias", "confidence_head.proj.bias"),
    ],
)
def test_damaged_heads_are_refused(change: str, message: str, tmp_path: Path) -> None:
    arrays = MARKOV.arrays()
    if change[0] == "-":
        del arrays[change[1:]]
    else:
        arrays[change].reshape(-1)[-1] = np.inf
    with pytest.raises(PacelineError, match=message) as raised:
        load_head(MARKOV.write(tmp_path / "head", arrays), target_at(tmp_path))
    assert raised.value.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"markov_rank": 64}, "markov_rank = 64, the weights 32"),
        ({"markov_rank": 0}, "markov_rank = 0, the weights 32"),
        ({"markov_head_type": "rnn"}, "'rnn', the weights are of a gated one"),
        ({"target_layer_ids": GONE}, "no target_layer_ids"),
        ({"mask_token_id": GONE}, "no mask_token_id"),
        ({"sample_from_anchor": "both"}, "sample_from_anchor = both"),
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma 4"),
        ({"num_target_layers": 36}, "36 layers"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    head = TinyHead(**{**MARKOV.__dict__, "settings": settings})
    with pytest.raises(PacelineError, match=message) as raised:
        load_head(head.write(tmp_path / "head"), target_at(tmp_path))
    assert raised.value.hint


def test_weights_of_other_shapes_are_refused(tmp_path: Path) -> None:
    for name, shape in (
        ("markov_head.markov_w1.weight", (100, 32)),
        ("markov_head.gate_proj.weight", (32, 64)),
        ("confidence_head.proj.weight", (1, 70)),
    ):
        arrays = MARKOV.arrays() | {name: np.zeros(shape, np.float32)}
        with pytest.raises(PacelineError, match=name.removesuffix(".weight")):
            load_head(MARKOV.write(tmp_path / "head", arrays), target_at(tmp_path))


def test_the_old_prefix_of_specforge_is_known(tmp_path: Path) -> None:
    head = CASES["specforge"].head
    plain = load_head(head.write(tmp_path / "plain"), target_at(tmp_path))
    arrays = {
        f"logit_head.{name}" if name.startswith(("markov", "confidence")) else name: values
        for name, values in head.arrays().items()
    }
    old = load_head(head.write(tmp_path / "old", arrays), target_at(tmp_path))
    for drafter in (plain, old):
        assert drafter.model.config.markov is not None
    drafts = [d.propose(heard(d, 3), 7).tokens for d in (plain, old)]
    assert drafts[0] == drafts[1]


def test_by_their_names(tmp_path: Path) -> None:
    """vLLM's and our own spelling, and the wrong one of the two."""
    from paceline.drafters import registry
    from paceline.drafters.loading import Host
    from support.draft_models import FixedCosts

    dflash, dspark = TinyHead().write(tmp_path / "f"), MARKOV.write(tmp_path / "s")
    host = Host(TOKENIZER, MODEL.vocab, 2, measure=lambda _: FixedCosts(), target=target_at(tmp_path))

    def made(spec: Any) -> Any:
        return registry.create(spec, vocab_size=MODEL.vocab, host=host)

    assert made(f"dflash:{dflash}").name == made({"method": "dflash", "model": str(dflash)}).name == "dflash"
    assert made(f"dspark:{dspark}") is made(f"dspark:model={dspark}")
    assert made(f"dspark:{dspark},sample_from_anchor=true,dtype=f32").model.config.anchor_first
    with pytest.raises(UsageError, match="kind dspark") as raised:
        made(f"dflash:{dspark}")
    assert f"dspark:{dspark}" in raised.value.hint
    with pytest.raises(UsageError, match="sample_from_anchor"):
        made(f"dspark:{dspark},sample_from_anchor=maybe")
    with pytest.raises(UsageError, match="needs a model"):
        made("dflash")


def test_through_the_api_the_text_is_the_same(tmp_path: Path) -> None:
    """With prices measured here and now: whatever is bought, nothing changes."""
    from paceline.engine.llm import LLM

    llm = LLM.from_target(target_at(tmp_path), TOKENIZER, speculate="off")
    path = MARKOV.write(tmp_path / "head")
    prompts = [PROMPT[:30], PROMPT[10:50], PROMPT[:31]]
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True)
        plain = llm.generate(prompts, params)
        for spec in (f"dspark:{path}", {"method": "dspark", "model": str(path), "num_speculative_tokens": 3}):
            for one, other in zip(plain, llm.generate(prompts, params, speculate=spec), strict=True):
                assert one.tokens == other.tokens
    (drafter,) = llm._host.models.values()
    assert drafter.broken is None
    assert drafter._seats == {}
