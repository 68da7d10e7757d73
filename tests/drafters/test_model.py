"""A draft model: right where it agrees, harmless where not, and its cache always what it says."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from paceline.core import Context, Draft, Prices, SamplingParams
from paceline.drafters.model import ModelDrafter
from paceline.errors import ModelFileError
from paceline.text.pairing import Mode
from support.draft_models import FixedCosts, Padded, Reordered, draft_model, other_merges, shuffled
from support.engines import engine_for, finish, run, same, submit
from support.planners import FixedPlanner
from support.stub_target import RandomRule, RepetitiveRule, Rule, StubTarget, greedy, mix
from support.tiny_tokenizer import EOS, VOCAB_SIZE

RULE = RepetitiveRule(VOCAB_SIZE, seed=1, peak=6.0)
NEAR = RepetitiveRule(VOCAB_SIZE, seed=1, peak=4.0)  # the same cycles, other surprises
PROMPT = [5, 6, 7, 8, 9]


VOCABULARIES = ("same", "padded", "short", "partial", "shuffled", "retold", "other words", "other ids")


def drafter_for(name: str, **stub: Any) -> ModelDrafter:
    """A drafter for one of the ways in which vocabularies can differ."""
    match name:
        case "same":
            return draft_model(NEAR, **stub)
        case "padded":
            return draft_model(Padded(NEAR, VOCAB_SIZE + 128), **stub)
        case "short":
            return draft_model(Reordered(NEAR, range(VOCAB_SIZE - 3)), **stub)
        case "partial":
            order = [*range(40), 41, 40, *range(42, VOCAB_SIZE)]
            tokenizer, _ = shuffled(order=order)
            return draft_model(Reordered(NEAR, order), tokenizer, **stub)
        case "shuffled":
            tokenizer, order = shuffled()
            return draft_model(Reordered(NEAR, order), tokenizer, **stub)
        case "retold":
            tokenizer, order = shuffled()
            return draft_model(Reordered(NEAR, order), tokenizer, mode="text", **stub)
    tokenizer, order = other_merges()
    mode: Mode = "text" if name == "other words" else "intersection"
    return draft_model(Reordered(NEAR, order), tokenizer, mode=mode, **stub)


def check_cache(drafter: ModelDrafter) -> None:
    """What a track claims to hold is exactly what the model wrote there, and no page has two owners."""
    model = drafter.model
    assert isinstance(model, StubTarget)
    drafter.cache.kv.check_integrity()
    for seat in drafter._seats.values():
        sequence = seat.track.sequence
        if sequence is None:
            assert seat.track.tail == []
            continue
        held = np.array([*sequence.tokens, *seat.track.tail], np.int32)
        slots = np.arange(len(held))
        size = model.page_size
        places = sequence.table[slots // size].astype(np.intp) * size + slots % size
        assert (model._store[places] == mix(held, slots)).all()
        if sequence.window_table is not None:
            # A prompt may be written over from its front; no draft reaches back so far.
            base = max(len(sequence), len(held) - model.max_rows // 2)
            seen = slots[max(0, base + 1 - model.sight) :]
            places = sequence.window_table[seen // size].astype(np.intp) * size + seen % size
            assert (model._near[places] == mix(held[seen], seen)).all()


class Watched(FixedPlanner):
    """Checks the drafter's cache whenever it was used."""

    def plan(self, *args: Any, **options: Any) -> list[Draft]:
        drafts = super().plan(*args, **options)
        assert isinstance(self.drafter, ModelDrafter)
        check_cache(self.drafter)
        return drafts


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "windowed": {"sight": 9, "everywhere": True},
    "alternating": {"sight": 9},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_x21_a_model_that_drafts_for_itself_is_always_right(temperature: float, kind: str) -> None:
    drafter = draft_model(RULE, **KINDS[kind])
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=500, ignore_eos=True)
    stub = {"context_limit": 600, **KINDS[kind]}
    done = run(engine_for(RULE, **stub), PROMPT, params, Watched(drafter, 4))
    same(run(engine_for(RULE, **stub), PROMPT, params), done)
    assert done.speculation.acceptance_rate == 1.0
    assert done.speculation.accepted_per_position == [100, 100, 100, 99]
    assert done.speculation.passes == 100  # 499 tokens, 5 at a time


@kinds
def test_x22_a_model_that_is_always_wrong_harms_nobody(kind: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    engine = engine_for(RULE, **KINDS[kind])
    wrong = Reordered(RULE, [*range(1, VOCAB_SIZE), 0])
    drafter = draft_model(wrong, **KINDS[kind])
    done = run(engine, PROMPT, params, Watched(drafter, 8))
    same(run(engine_for(RULE, **KINDS[kind]), PROMPT, params), done)
    assert engine.target.passes <= 200  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0},
        {"logit_bias": {7: 4.0}},
        {"min_tokens": 60},
    ],
)
def test_it_samples_as_the_request_does(extra: dict[str, Any]) -> None:
    rule = RandomRule(VOCAB_SIZE, seed=2)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=61, **extra)
    done = run(engine_for(rule), PROMPT, params, FixedPlanner(draft_model(rule), 3))
    same(run(engine_for(rule), PROMPT, params), done)
    assert done.speculation.acceptance_rate == 1.0


def test_shared_noise_makes_it_agree_more_often() -> None:
    """Two models that differ a little: drawn with one noise they agree far oftener than by chance."""
    near = SimilarRule(RandomRule(VOCAB_SIZE, seed=2), RandomRule(VOCAB_SIZE, seed=3), 0.1)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=300, ignore_eos=True)
    done = run(engine_for(near.first), PROMPT, params, FixedPlanner(draft_model(near), 1))
    assert done.speculation.acceptance_rate > 0.75
    independent = run(engine_for(near.first), PROMPT, params, Greedy(draft_model(near)))
    assert independent.speculation.acceptance_rate < 0.5


class SimilarRule:
    """The logits of one rule with some of another's mixed in."""

    def __init__(self, first: Rule, second: Rule, share: float) -> None:
        self.first, self.second, self.share = first, second, share
        self.vocab_size = first.vocab_size

    def logits(self, histories: Any, tokens: Any, positions: Any) -> Any:
        mine = self.first.logits(histories, tokens, positions)
        return mine + np.float32(self.share) * self.second.logits(histories, tokens, positions)


class Greedy(FixedPlanner):
    """Lets the drafter believe that the request is greedy."""

    def __init__(self, drafter: ModelDrafter) -> None:
        super().__init__(drafter, 1)

    def _ask(self, drafter: Any, context: Context, budget: int) -> Draft:
        plain = Context(context.request, context.tokens, context.prompt_length)
        return super()._ask(drafter, plain, budget)


def random_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.choice([1, 2, 5, 12, 24])
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 0, 20]),
        top_p=rng.choice([1.0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        logit_bias=rng.choice([{}, {}, {VOCAB_SIZE - 1: 3.0, 4: -2.0}]),
        min_tokens=rng.choice([0, 0, max_tokens // 2]),
        ignore_eos=rng.random() < 0.5,
        seed=rng.getrandbits(40),
        max_tokens=max_tokens,
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", VOCABULARIES)
def test_random_batches_equal_plain_decoding(name: str, seed: int) -> None:
    """Several requests share one draft model with too few pages, on an engine that preempts."""
    rng = random.Random(f"{name} {seed}")
    for _ in range(8):
        drafter = drafter_for(
            name,
            **rng.choice(list(KINDS.values())),
            max_rows=32,
            page_size=rng.choice([2, 4]),
            pages=rng.choice([14, 30, 60]),
            context_limit=rng.choice([24, 40, 90]),
        )
        engine = engine_for(
            RULE,
            page_size=rng.choice([2, 4, 8]),
            pages=rng.choice([40, 60]),
            max_rows=rng.choice([5, 24]),
            context_limit=80,
        )
        prompts = [random_prompt(rng) for _ in range(4)]
        params = [random_params(rng) for _ in range(4)]
        requests = [
            submit(engine, prompt, its, Watched(drafter, rng.choice([1, 3, 8])))
            for prompt, its in zip(prompts, params, strict=True)
        ]
        for prompt, its, done in zip(prompts, params, finish(engine, *requests), strict=True):
            same(run(engine_for(RULE), prompt, its), done)
        assert drafter._seats == {}
        assert drafter.cache.kv.available == drafter.cache.kv.pages


def random_prompt(rng: random.Random) -> list[int]:
    phrase = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
    return (phrase * 4)[: rng.randint(1, 30)]


@pytest.mark.parametrize("name", ["same", "padded", "short", "partial", "shuffled", "retold", "other ids"])
def test_every_vocabulary_is_drafted_from(name: str) -> None:
    """Text that both models spell alike is drafted about equally well under any ids."""
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    plain = run(engine_for(RULE), PROMPT, params)
    done = run(engine_for(RULE), PROMPT, params, Watched(drafter_for(name), 3))
    same(plain, done)
    assert done.speculation.acceptance_rate > 0.3


def test_ids_that_one_side_lacks_are_never_drafted() -> None:
    short = drafter_for("short")
    padded = drafter_for("padded")  # its padding has the highest logits of all
    partial = drafter_for("partial")
    for drafter, forbidden in ((short, {259, 260, 261}), (padded, set()), (partial, {40, 41})):
        drafted: set[int] = set()
        for first in range(0, VOCAB_SIZE, 3):
            drafted |= set(drafter.propose(Context(first, [first, 1], 2), 6).tokens)
        assert drafted <= set(range(VOCAB_SIZE)) - forbidden
        assert len(drafted) > 50


@kinds
def test_the_first_guess_is_what_a_fresh_model_would_say(kind: str) -> None:
    """Whatever was drafted, kept, forgotten and evicted before: the cache changes nothing."""
    rng = random.Random(1)
    drafter = draft_model(NEAR, page_size=4, pages=24, **KINDS[kind])
    contexts = [Context(i, random_prompt(rng), 1) for i in range(4)]
    for _ in range(120):
        context = rng.choice(contexts)
        draft = drafter.propose(context, rng.randint(1, 5))
        check_cache(drafter)
        if len(draft):
            assert draft.tokens == greedy(NEAR, context.tokens, len(draft), **KINDS[kind])
        kept = rng.randint(0, len(draft))
        context.tokens += [*draft.tokens[:kept], rng.randrange(VOCAB_SIZE)]
        if rng.random() < 0.8:
            drafter.commit(context, None)
        if len(context.tokens) > 40:
            drafter.forget(context)
            contexts[contexts.index(context)] = Context(1000 + _, random_prompt(rng), 1)


def test_nothing_is_computed_twice() -> None:
    drafter = draft_model(RULE)
    params = SamplingParams(temperature=0.0, max_tokens=101, ignore_eos=True)
    run(engine_for(RULE), PROMPT, params, FixedPlanner(drafter, 4))
    model = drafter.model
    assert isinstance(model, StubTarget)
    # Prompt and first token, then in each of 20 steps the bonus, the last draft and three drafted ones.
    assert sum(model.row_counts) == 6 + 3 + 19 * 5
    assert max(model.row_counts[1:]) == 2


def test_after_a_pause_it_catches_up_in_one_pass() -> None:
    """User problem A8."""
    drafter = draft_model(RULE)
    context = Context(1, list(PROMPT), 5)
    drafter.propose(context, 2)
    for token in greedy(RULE, PROMPT, 9):
        context.tokens.append(token)
        drafter.commit(context, None)
    model = drafter.model
    assert isinstance(model, StubTarget)
    before = len(model.row_counts)
    assert drafter.propose(context, 1).tokens == greedy(RULE, context.tokens, 1)
    assert model.row_counts[before:] == [9 - 1]  # one of the nine was drafted and computed


@kinds
def test_a_prompt_longer_than_a_pass_is_read_in_parts(kind: str) -> None:
    """However long, it takes window pages for what a pass sees."""
    drafter = draft_model(RULE, max_rows=7, page_size=4, pages=60, **KINDS[kind])
    prompt = [(i * i + 5) % VOCAB_SIZE for i in range(200)]
    context = Context(1, list(prompt), 200)
    for length in (3, 1, 2):
        expected = greedy(RULE, context.tokens, length, **KINDS[kind])
        assert drafter.propose(context, length).tokens == expected
        context.tokens += [*expected, 7]
        check_cache(drafter)
    model = drafter.model
    assert isinstance(model, StubTarget)
    assert len(model.touched) <= (-(-(8 + 7) // 4) + 3 if kind != "full" else 0)


@kinds
def test_drafting_stops_at_the_models_own_context_limit(kind: str) -> None:
    """User problems A9 and C5: past its limit the draft model is silent, and the text goes on."""
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    drafter = draft_model(RULE, context_limit=64, **KINDS[kind])
    done = run(engine_for(RULE, **KINDS[kind]), PROMPT, params, Watched(drafter, 5))
    same(run(engine_for(RULE, **KINDS[kind]), PROMPT, params), done)
    assert [i for i, source in enumerate(done.token_sources) if source][-1] == 58  # positions 5 to 63


def test_batches_take_one_pass_per_token() -> None:
    drafter = draft_model(RULE)
    contexts = [Context(i, [i, i + 1, i + 2], 3) for i in range(4)]
    drafts = drafter.propose_many(contexts, [3, 3, 2, 0], None)
    assert [d.tokens for d in drafts] == [
        *(greedy(RULE, c.tokens, n) for c, n in zip(contexts, (3, 3, 2), strict=False)), [],
    ]  # fmt: skip
    model = drafter.model
    assert isinstance(model, StubTarget)
    assert model.row_counts == [9, 3, 2]


def test_a_second_choice_stands_beside_an_unsure_first() -> None:
    drafter = draft_model(RandomRule(VOCAB_SIZE, seed=7), costs=FixedCosts(1e-4, 1e-5))
    prices = Prices(plain=1.0, tokens=1.0, extra=[0.001 * n for n in range(20)])
    found = 0
    for request in range(20):
        (draft,) = drafter.propose_many([Context(request, [request, 3], 2)], [8], prices)
        shares: dict[int, float] = {}
        for parent, chance in zip(draft.parents, draft.chances, strict=True):
            shares[parent] = shares.get(parent, 0.0) + chance
        assert all(share <= 1.0 + 1e-6 for share in shares.values())
        found += len(shares) < len(draft)
        assert len(draft) <= 8
    assert found > 10


def test_a_draft_that_cannot_pay_is_not_begun() -> None:
    """Drafting a token costs as much as writing one."""
    drafter = draft_model(RULE, costs=FixedCosts(1.0, 0.1))
    prices = Prices(plain=1.0, tokens=1.0, extra=[0.1 * n for n in range(20)])
    assert len(drafter.propose_many([Context(1, PROMPT, 5)], [8], prices)[0]) == 0
    model = drafter.model
    assert isinstance(model, StubTarget)
    assert model.row_counts == []


def test_end_tokens_end_a_draft() -> None:
    class Ends(RepetitiveRule):
        def logits(self, histories: Any, tokens: Any, positions: Any) -> Any:
            logits = super().logits(histories, tokens, positions)
            logits[positions == 6, EOS] = 99.0
            return logits

    drafter = draft_model(Ends(VOCAB_SIZE))
    assert drafter.propose(Context(1, list(PROMPT), 5), 8).tokens[-1] == EOS
    assert len(drafter.propose(Context(1, list(PROMPT), 5), 8)) == 3
    on = Context(2, list(PROMPT), 5, params=SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(drafter.propose(on, 8)) == 8


def test_a_broken_draft_model_stays_off_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """User problem B26: what ends is the drafting."""
    drafter = draft_model(RULE)
    model = drafter.model
    assert isinstance(model, StubTarget)
    model.fail = ModelFileError("its numbers overflow")
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    done = run(engine_for(RULE), PROMPT, params, FixedPlanner(drafter, 4))
    same(run(engine_for(RULE), PROMPT, params), done)
    assert done.speculation.drafted == 0
    assert drafter.broken == "its numbers overflow"
    assert "stays off" in caplog.text


def test_chances_are_learnt_from_what_becomes_of_guesses() -> None:
    """An unrelated draft model is soon known to be worth nothing, a perfect one to be worth all."""
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    for rule, low, high in ((RandomRule(VOCAB_SIZE, seed=77), 0.0, 0.1), (RULE, 0.9, 1.0)):
        drafter = draft_model(rule)
        planner = FixedPlanner(drafter, 2)
        run(engine_for(RULE), PROMPT, params, planner)
        last = planner.outcomes[-1].draft.chances
        assert low <= float(last[0]) <= high


def test_interrupted_anywhere_it_starts_anew() -> None:
    drafter = draft_model(RULE, pages=30)
    context = Context(1, list(PROMPT), 5)
    drafter.propose(context, 3)
    drafter.cache.kv.reserve(drafter._seats[1].track.sequence, 9)  # type: ignore[arg-type]
    drafter.reset()
    assert drafter.cache.kv.available == 30
    assert drafter.propose(context, 3).tokens == greedy(RULE, PROMPT, 3)
    check_cache(drafter)
