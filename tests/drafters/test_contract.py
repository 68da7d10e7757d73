"""What every registered drafter must do; runs on each row of the registry by itself.

Drafters that are models run on a stub. They know something about every text and remember none, so what is
asked of those that copy is not asked of them.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import ROOT, Context, Draft, Drafter, Outcome
from paceline.drafters import registry
from support.draft_models import draft_model
from support.self_hearing import Hearing
from support.stub_target import RandomRule

VOCAB = 50

# Lookups that share nothing between requests, so that equal requests must give equal drafts.
ALONE = {"suffix": {"max_tokens": 0}}


def make(name: str, *, alone: bool = False) -> Drafter:
    options = ALONE.get(name, {}) if alone else {}
    if name == "model":
        return draft_model(RandomRule(VOCAB, seed=4), target_vocab=VOCAB)
    if "host" in registry.REGISTRY[name].shared:
        return Hearing(name, VOCAB)
    return registry.create({"method": name, **options}, vocab_size=VOCAB, identity="test")


def start(request: int, tokens: list[int], prediction: list[int] | None = None) -> Context:
    return Context(request, list(tokens), len(tokens), prediction or ())


def accepted_path(draft: Draft, truth: list[int]) -> tuple[int, ...]:
    path: list[int] = []
    node = ROOT
    for token in truth:
        found = [i for i, p in enumerate(draft.parents) if p == node and draft.tokens[i] == token]
        if not found:
            break
        node = found[0]
        path.append(node)
    return tuple(path)


def advance(drafter: Drafter, context: Context, draft: Draft, truth: list[int]) -> None:
    """One step of the engine: commit what agrees with `truth`, and one token more."""
    path = accepted_path(draft, truth)
    committed = truth[: len(path) + 1]
    context.tokens += committed
    outcome = Outcome(draft, path, tuple(committed)) if len(draft) else None
    drafter.commit(context, outcome)


def write(drafter: Drafter, context: Context, truth: list[int], budget: int) -> list[list[int]]:
    """Write `truth` with the drafter's help; returns the tokens of each draft."""
    drafter.commit(context, None)
    drafts = []
    at, end = len(context.tokens), len(context.tokens) + len(truth)
    whole = context.tokens + truth
    while (at := len(context.tokens)) < end:
        draft = drafter.propose(context, budget)
        drafts.append(draft.tokens)
        advance(drafter, context, draft, whole[at:end])
    return drafts


def check(draft: Draft, name: str, budget: int) -> None:
    n = len(draft)
    assert n <= budget
    assert len(draft.parents) == len(draft.chances) == n
    assert draft.sources == (name,) * n
    assert all(0 <= token < VOCAB for token in draft.tokens)
    assert all(0 <= chance <= 1 for chance in draft.chances)
    shares: dict[int, float] = {}
    edges = set()
    for i, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        assert ROOT <= parent < i
        edges.add((parent, token))
        shares[parent] = shares.get(parent, 0.0) + draft.chances[i]
    assert len(edges) == n, "siblings must differ"
    assert all(share <= 1.0 + 1e-5 for share in shares.values())


names = pytest.mark.parametrize("name", registry.names())
lookups = pytest.mark.parametrize(
    "name", [n for n, row in registry.REGISTRY.items() if "host" not in row.shared]
)
copiers = pytest.mark.parametrize(
    "name",
    [n for n, row in registry.REGISTRY.items() if n != "grammar" and "host" not in row.shared],
)
"""Those that guess from text; what a constraint forces has nothing to do with it."""

texts = st.lists(st.integers(0, 4), max_size=60)


@names
@settings(max_examples=60, deadline=None)
@given(
    prompt=texts, truth=texts, prediction=texts, budgets=st.lists(st.integers(0, 9), min_size=1, max_size=8)
)
def test_drafts_are_sound_and_the_context_untouched(name, prompt, truth, prediction, budgets):
    drafter = make(name)
    context = start(1, prompt, prediction)
    drafter.commit(context, None)
    whole = prompt + truth
    step = 0
    while len(context.tokens) < len(whole):
        before = list(context.tokens)
        budget = budgets[step % len(budgets)]
        draft = drafter.propose(context, budget)
        check(draft, name, budget)
        assert context.tokens == before
        assert list(context.prediction) == prediction
        assert context.prompt_length == len(prompt)
        advance(drafter, context, draft, whole[len(before) :])
        step += 1
    drafter.forget(context)


@lookups
def test_offers_nothing_when_nothing_is_known(name):
    drafter = make(name)
    for request, tokens in enumerate(([], [7], [1, 2, 3, 4, 5, 6, 7, 8])):
        context = start(request, tokens)
        drafter.commit(context, None)
        assert len(drafter.propose(context, 8)) == 0


@copiers
def test_learns_a_plain_repetition(name):
    phrase = [3, 1, 4, 15, 9, 2, 6]
    drafter = make(name)
    context = start(1, phrase * 6, prediction=phrase * 8)
    drafts = write(drafter, context, phrase * 4, 7)
    # Every drafter copies here: far fewer steps than tokens.
    assert len(drafts) <= 14
    last = drafter.propose(context, 7)
    assert last.tokens[: len(phrase)] == phrase[: len(last)]
    assert len(last) > 0


@names
def test_propose_may_come_before_any_commit(name):
    phrase = [3, 1, 4, 15, 9, 2, 6]
    drafter = make(name)
    check(drafter.propose(start(1, phrase * 3), 4), name, 4)


@names
def test_forget_may_come_early_twice_and_for_strangers(name):
    drafter = make(name)
    context = start(1, [1, 2, 1, 2, 1])
    drafter.forget(context)
    drafter.commit(context, None)
    drafter.forget(context)
    drafter.forget(context)
    check(drafter.propose(start(2, [1, 2, 1, 2, 1]), 4), name, 4)


def story(seed: int, length: int = 120) -> tuple[list[int], list[int]]:
    """A prompt and an output that mostly copies it."""
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(40)] * 2
    at = rng.randrange(40)
    truth = [rng.randrange(VOCAB) if i % 31 == 30 else prompt[(at + i) % 40] for i in range(length)]
    return prompt, truth


@lookups
def test_a_repeated_request_is_drafted_as_well_as_the_first_time(name):
    """User problems A19 to A21: nothing of other requests leaks in, nothing decays."""
    prompt, truth = story(1)
    drafter = make(name, alone=True)
    context = start(0, prompt, prompt)
    first = write(drafter, context, truth, 6)
    drafter.forget(context)
    for request in range(1, 60):
        other, other_truth = story(request + 1, 20)
        context = start(request, other[: 20 + request % 30], other)
        write(drafter, context, other_truth, 6)
        drafter.forget(context)
    context = start(99, prompt, prompt)
    again = write(drafter, context, truth, 6)
    # What is claimed may have changed by what was learnt; what is known of this text has not.
    assert len(again) <= len(first) + 1
    assert sum(len(d) > 0 for d in again) >= 0.9 * sum(len(d) > 0 for d in first)


@copiers
def test_requests_side_by_side_draft_as_they_would_alone(name):
    """User problem A22, with text so plain that every draft is as long as it may be."""
    phrases = [[i, i + 10, i + 20, i + 30, 5, 6, 7] for i in range(4)]
    drafter = make(name, alone=True)
    contexts = [start(i, phrase * 5, phrase * 9) for i, phrase in enumerate(phrases)]
    for context in contexts:
        drafter.commit(context, None)
    for step in range(14):
        for context, phrase in zip(contexts, phrases, strict=True):
            expected = (phrase * 3)[step % 7 :][:5]
            if step:
                assert drafter.propose(context, 5).tokens[:5] == expected[:5]
            context.tokens.append(expected[0])
            drafter.commit(context, None)


@copiers
def test_follows_the_text_while_speculation_is_off(name):
    """User problem A8: after a spell without drafts it knows what was written meanwhile."""
    phrase = [11, 12, 13, 14, 15, 16, 17]
    drafter = make(name, alone=True)
    context = start(1, [1, 2, 3], prediction=[1, *phrase * 4])
    drafter.commit(context, None)
    for token in phrase * 3:
        context.tokens.append(token)
        drafter.commit(context, None)
    assert drafter.propose(context, 4).tokens == phrase[:4]


@copiers
def test_many_tokens_may_arrive_at_once(name):
    phrase = [11, 12, 13, 14, 15, 16, 17]
    one, other = make(name, alone=True), make(name, alone=True)
    context = start(1, phrase * 2, prediction=phrase * 4)
    twin = start(1, phrase * 2, prediction=phrase * 4)
    one.commit(context, None)
    other.commit(twin, None)
    for token in phrase + phrase[:3]:
        context.tokens.append(token)
        one.commit(context, None)
    twin.tokens += phrase + phrase[:3]
    other.commit(twin, None)
    assert one.propose(context, 6).tokens == other.propose(twin, 6).tokens != []
