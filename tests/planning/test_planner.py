"""The planner against exhaustive search, and its promises: nothing bought that does not pay."""

from __future__ import annotations

import itertools
import random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import ROOT, Context, Draft, Outcome
from paceline.planning.credit import Stake
from paceline.planning.pass_time import PassTime
from paceline.planning.planner import Planner
from paceline.planning.prices import MARGIN, best_prefix
from support.drafters import Adversary, KnownDrafter, Oracle, SyntheticAcceptance

TABLE = {1: 5.0e-3, 2: 5.1e-3, 4: 5.5e-3, 8: 7.0e-3, 16: 13.0e-3}
VOCAB = 97


def next_token(history: list[int]) -> int:
    return (history[-1] * 7 + len(history)) % VOCAB


def context(request: int = 1) -> Context:
    return Context(request, [request, 2, 3], 3)


class Fixed(KnownDrafter):
    """Always offers the same tree."""

    def __init__(self, name: str, tree: Draft) -> None:
        super().__init__()
        self.name = name
        self.tree = tree

    def draft(self, context: Context, budget: int) -> Draft:
        return self.tree


def fixed(parents: list[int], chances: list[float]) -> Fixed:
    """Tokens are numbered by node."""
    n = len(parents)
    return Fixed("fixed", Draft(list(range(n)), parents, chances, ("fixed",) * n))


def clock_of(*drafters: KnownDrafter, cost: float = 0.0):
    """A clock that only moves when a drafter is asked, by `cost` each time."""
    return lambda: cost * sum(d.asked for d in drafters)


def planner(table: dict[int, float], *drafters: KnownDrafter, cost: float = 0.0, **options: int) -> Planner:
    return Planner(PassTime(table), drafters, clock=clock_of(*drafters, cost=cost), **options)


def with_plenty_at_stake():
    """Plans as for a request that has won a lot already, so that only the price decides."""
    return mock.patch.object(Stake, "START", 1e9)


def closed_sets(parents: list[int]) -> list[tuple[int, ...]]:
    """Every set of nodes that holds the parent of each of its nodes."""
    n = len(parents)
    return [
        nodes
        for size in range(n + 1)
        for nodes in itertools.combinations(range(n), size)
        if all(parents[i] == ROOT or parents[i] in nodes for i in nodes)
    ]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[float], dict[int, float]]:
    n = draw(st.integers(1, 8))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    chances = [draw(st.integers(1, 100).map(lambda x: x / 100)) for _ in range(n)]
    steps = [draw(st.sampled_from([0.0, 0.02, 0.1, 0.5, 2.0])) for _ in range(n)]
    costs = np.cumsum([1.0, *steps])
    return parents, chances, {i + 1: float(c) for i, c in enumerate(costs)}


@settings(max_examples=300, deadline=None)
@given(problems())
def test_no_set_of_nodes_is_better(problem):
    parents, chances, table = problem
    drafter = fixed(parents, chances)
    with with_plenty_at_stake():
        plan = planner(table, drafter).plan([context()], [8])[0]
    path = drafter.tree.path_chances()
    best = max((1 + sum(path[i] for i in nodes)) / table[1 + len(nodes)] for nodes in closed_sets(parents))
    got = (1 + sum(plan.path_chances())) / table[1 + len(plan)]
    if best <= MARGIN / table[1]:
        assert got >= 1 / table[1] * (1 - 1e-6)
    else:
        assert got == pytest.approx(best, rel=1e-5)


def test_looks_past_a_step_in_the_cost():
    """Rows 2 to 4 cost as much as row 8: the first is dear, the eighth is worth it."""
    table = {1: 1.0, 2: 1.9, 8: 1.9, 9: 9.0}
    drafter = fixed([-1, 0, 1, 2, 3, 4, 5, 6, 7], [0.85] * 9)
    assert len(planner(table, drafter).plan([context()], [9])[0]) == 7
    hopeless = fixed([-1, 0, 1], [0.5] * 3)
    assert len(planner(table, hopeless).plan([context()], [9])[0]) == 0


def test_takes_the_likeliest_of_a_tree():
    drafter = fixed([-1, 0, -1, 2], [0.6, 0.3, 0.35, 0.9])
    # Path chances 0.6, 0.18, 0.35, 0.315; rows are dear after the third.
    plan = planner({1: 1.0, 4: 1.1, 5: 3.0}, drafter).plan([context()], [9])[0]
    assert plan.tokens == [0, 2, 3]
    assert plan.parents == [-1, -1, 1]


def test_requests_share_the_rows_of_a_pass_by_chance():
    class Knows(KnownDrafter):
        name = "knows"

        def draft(self, context: Context, budget: int) -> Draft:
            chance = 0.9 if context.request == 1 else 0.3
            return Draft.chain(list(range(budget)), [chance] * budget, self.name)

    # Rows beyond ten cost a step each.
    table = {1: 1.0, 10: 1.1, 20: 11.1}
    plans = planner(table, Knows()).plan([context(1), context(2), context(3)], [15, 15, 15])
    # Chances 0.9, 0.81, 0.73, 0.66, 0.59 | 0.53 beats 0.3 | 0.48: seven rows besides the three.
    assert [len(plan) for plan in plans] == [7, 0, 0]
    plans = planner(table, Knows()).plan([context(1), context(2), context(3)], [4, 15, 15])
    assert [len(plan) for plan in plans] == [4, 2, 1]


def test_a_full_batch_leaves_nothing_to_spend():
    drafter = Oracle(next_token, chance=0.8)
    table = {1: 1.0, 4: 1.0, 64: 16.0}
    contexts = [context(i) for i in range(1, 33)]
    alone = planner(table, drafter).plan(contexts[:1], [8])
    crowd = planner(table, drafter).plan(contexts, [8] * 32)
    assert len(alone[0]) >= 3
    assert sum(len(plan) for plan in crowd) == 0


def test_rooms_are_kept():
    drafter = Oracle(next_token)
    plans = planner({1: 1.0, 64: 1.0}, drafter).plan([context(i) for i in range(1, 5)], [0, 1, 7, 99])
    assert [len(plan) for plan in plans] == [0, 1, 7, 15]


def test_without_room_nobody_is_asked():
    drafter = Oracle(next_token)
    planner({1: 1.0}, drafter).plan([context()], [0])
    assert drafter.asked == 0


def test_merged_drafts_are_cut_to_the_room_by_chance():
    one, two = (
        Fixed("one", Draft.chain([0, 1, 2], [0.5] * 3, "one")),
        Fixed("two", Draft.chain([90, 91, 92], [0.4, 0.9, 0.9], "two")),
    )
    plan = planner({1: 1.0, 64: 1.0}, one, two).plan([context()], [3])[0]
    assert plan.tokens == [0, 90, 91]
    assert plan.sources == ("one", "two", "two")


def test_a_fixed_draft_length_is_taken_where_offered():
    drafter = Oracle(next_token, chance=0.01)
    dear = {1: 1.0, 64: 64.0}
    five = planner(dear, drafter, draft_length=5)
    assert [len(plan) for plan in five.plan([context(1), context(2)], [9, 3])] == [5, 3]
    assert len(planner(dear, drafter).plan([context()], [9])[0]) == 0


def test_off_says_why():
    off = planner({1: 1.0})
    assert off.plan([context()], [9])[0].tokens == []
    assert off.off_reason(context()) == "speculation is off"

    unasked = planner({1: 1.0}, Oracle(next_token))
    unasked.plan([context()], [0])
    assert unasked.off_reason(context()) == "the text ended before a draft could be made"

    ignorant = planner({1: 1.0}, fixed([], []))
    ignorant.plan([context()], [9])
    assert ignorant.off_reason(context()) == "no drafter knew how this text might go on"

    dear = planner({1: 1.0, 2: 2.0}, Oracle(next_token, chance=0.5))
    dear.plan([context()], [9])
    assert dear.off_reason(context()) == "no draft was likely enough to be worth its time"

    on = planner({1: 1.0, 64: 1.0}, Oracle(next_token))
    on.plan([context()], [9])
    assert on.off_reason(context()) is None


def test_commit_forget_and_close_reach_every_drafter():
    closed = []
    one, two = Oracle(next_token), Adversary(next_token, VOCAB)
    one.close = lambda: closed.append("one")  # type: ignore[attr-defined]
    both = planner({1: 1.0}, one, two)
    draft = Draft.chain([1], [0.5], "oracle")
    outcome = Outcome(draft, (0,), (1, 2))
    both.commit(context(), None)
    both.commit(context(), outcome)
    both.forget(context())
    both.close()
    assert one.outcomes == two.outcomes == [None, outcome]
    assert one.forgotten == two.forgotten == [1]
    assert closed == ["one"]


def run(
    drafter: KnownDrafter, steps: int, *, cost: float = 0.0, table: dict[int, float] | None = None
) -> tuple[float, float]:
    """Write with a drafter; returns (seconds of the passes and questions, seconds of plain decoding)."""
    table = table or TABLE
    plan_maker = planner(table, drafter, cost=cost)
    text = context()
    seconds, tokens = 0.0, 0
    for _ in range(steps):
        draft = plan_maker.plan([text], [15])[0]
        truth = list(text.tokens)
        path: list[int] = []
        for i, token in enumerate(draft.tokens):
            if token != next_token(truth):
                break
            truth.append(token)
            path.append(i)
        committed = [*truth[len(text.tokens) :], next_token(truth)]
        text.tokens += committed
        outcome = Outcome(draft, tuple(path), tuple(committed)) if len(draft) else None
        plan_maker.commit(text, outcome)
        seconds += plan_maker.pass_time.cost(1 + len(draft))
        tokens += len(committed)
    return seconds + cost * drafter.asked, tokens * table[1]


def test_a_liar_is_found_out():
    spent, plain = run(Adversary(next_token, VOCAB), 2_000)
    assert spent <= 1.02 * plain


def test_a_costly_drafter_that_does_not_help_is_left_alone():
    """A draft model at a fifth of a step, right one time in twenty and honest about it."""
    drafter = SyntheticAcceptance(next_token, [0.05] * 4, VOCAB)
    spent, plain = run(drafter, 4_000, cost=1.0e-3)
    assert spent <= 1.02 * plain
    assert drafter.asked >= 20, "it is asked again now and then"


def test_a_costly_drafter_that_helps_is_asked_every_time():
    drafter = SyntheticAcceptance(next_token, [0.8] * 5, VOCAB)
    spent, plain = run(drafter, 1_000, cost=1.0e-3)
    assert drafter.asked == 1_000
    assert plain / spent > 2.0


@pytest.mark.parametrize("chances", [[0.05] * 8, [0.3] * 8, [0.6] * 8, [0.9] * 8, [0.95, 0.1, 0.1]])
def test_never_slower_and_near_the_best_fixed_length(chances):
    """Honest drafts that cost nothing: within a few percent of the best length chosen beforehand."""
    spent, plain = run(SyntheticAcceptance(next_token, chances, VOCAB), 3_000)
    costs = [0.0, *PassTime(TABLE).costs(1, 9)]
    reach = np.cumprod(chances)
    best = max(1.0, *((1 + reach[:n].sum()) * costs[1] / costs[1 + n] for n in range(1, len(chances) + 1)))
    assert spent <= 1.02 * plain
    assert plain / spent == pytest.approx(best, rel=0.06)


def test_the_same_record_wakes_and_sleeps_with_the_text():
    """Acceptance that turns bad in mid-request: a free drafter goes quiet, the loss stays within bounds."""

    class Turning(SyntheticAcceptance):
        def draft(self, context: Context, budget: int) -> Draft:
            self.chances = (0.9,) * 6 if self.asked < 200 else (0.0,) * 6
            draft = super().draft(context, budget)
            # It does not notice: it goes on claiming nine in ten.
            return Draft.chain(draft.tokens, [0.9] * len(draft), self.name)

    drafter = Turning(next_token, [0.9], VOCAB)
    spent, plain = run(drafter, 200)
    assert plain / spent > 2.5
    more, less = run(Turning(next_token, [0.9], VOCAB), 2_000)
    assert (more - spent) <= 1.05 * (less - plain)


@pytest.mark.parametrize("chance", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("length", [8, 20, 60])
def test_a_short_text_on_which_every_chance_is_wrong_loses_little(chance, length):
    """Chances right on average, wrong throughout one answer: at most two percent and a tenth of a step."""
    drafter = Adversary(next_token, VOCAB, chance=chance)
    spent, plain = run(drafter, length)
    assert spent <= 1.02 * plain + 0.1 * TABLE[1]


def test_a_request_that_wins_may_take_dear_drafts_again():
    drafter = Oracle(next_token, chance=0.9)
    spent, plain = run(drafter, 40)
    assert plain / spent > 4.0


def test_an_uncertain_draft_is_cut_to_what_the_request_can_afford():
    # Each row costs a tenth of a step. Three of them fail with chance 0.6: a risk of 0.18; the stake is less,
    # and so is a twentieth of what they promise, 0.4 + 0.32 + 0.256 - 0.3. One risks 0.06.
    table = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}
    drafter = fixed([-1, 0, 1], [0.4, 0.8, 0.8])
    with with_plenty_at_stake():
        assert len(planner(table, drafter).plan([context()], [9])[0]) == 3
    assert len(planner(table, drafter).plan([context()], [9])[0]) == 1


@given(st.lists(st.floats(0, 1), max_size=12), st.integers(1, 5))
def test_best_prefix_is_the_best_of_all_prefixes(paths, base):
    paths.sort(reverse=True)
    rng = random.Random(len(paths))
    costs = np.cumsum([0.0, 1.0, *(rng.random() for _ in range(base + len(paths)))]).tolist()
    extra = [cost - costs[base] for cost in costs[base:]]
    count = best_prefix(paths, extra, costs[base], base)
    rates = [(base + sum(paths[:n])) / costs[base + n] for n in range(len(paths) + 1)]
    assert rates[count] == pytest.approx(max(rates[0], *(r for r in rates if r > MARGIN * rates[0]), 0))


# --- many requests ---------------------------------------------------------------------------------------

WIDE = {1: 10.0e-3, 2: 10.5e-3, 4: 12.0e-3, 8: 16.0e-3, 16: 27.0e-3}
"""Seconds as measured for a model of half a billion parameters: past 8 rows each takes 1.4 ms."""


def bought(chance: float, **company: int) -> int:
    drafter = fixed([-1], [chance])
    with with_plenty_at_stake():
        return len(planner(WIDE, drafter).plan([context()], [4], **company)[0])


def test_a_draft_must_beat_the_rate_of_the_pass_it_is_in():
    # Alone a token takes 10 ms and the second row 0.5.
    assert [bought(chance) for chance in (0.04, 0.07)] == [0, 1]
    # Beside 24 prompt rows it takes 1.375: those are paid for, and a token still takes 10 ms.
    assert [bought(chance, base_rows=25) for chance in (0.13, 0.15)] == [0, 1]
    # Among 16 texts a token takes 27 / 16 ms, and so a row of 1.375 must be rather sure; prompts or not.
    assert [bought(chance, decoding=16, base_rows=16) for chance in (0.88, 0.92)] == [0, 1]
    assert [bought(chance, decoding=16, base_rows=40) for chance in (0.88, 0.92)] == [0, 1]


def test_nobody_is_asked_when_the_pass_is_full():
    drafter = Oracle(next_token)
    full = planner({1: 1.0, 2: 2.0, 4: 4.0}, drafter)
    contexts = [context(i) for i in range(2)]
    assert [len(draft) for draft in full.plan(contexts, [8, 8])] == [0, 0]
    assert drafter.asked == 0
    assert full.off_reason(contexts[0]) == (
        "so many requests shared each pass that no draft could have been worth its time"
    )


def together(drafters, requests: int, steps: int, cost: float) -> tuple[float, float]:
    """Seconds spent by requests that share every pass, and what plain steps would have taken."""
    plan_maker = planner(WIDE, *drafters, cost=cost)
    texts = [context(i) for i in range(requests)]
    seconds, plain = 0.0, 0.0
    for _ in range(steps):
        drafts = plan_maker.plan(texts, [15] * requests)
        for text, draft in zip(texts, drafts, strict=True):
            truth, path = list(text.tokens), []
            for i, token in enumerate(draft.tokens):
                if token != next_token(truth):
                    break
                truth.append(token)
                path.append(i)
            committed = [*truth[len(text.tokens) :], next_token(truth)]
            text.tokens += committed
            plan_maker.commit(text, Outcome(draft, tuple(path), tuple(committed)) if len(draft) else None)
            plain += len(committed) * plan_maker.pass_time.cost(requests) / requests
        seconds += plan_maker.pass_time.cost(requests + sum(map(len, drafts)))
    return seconds + cost * sum(drafter.asked for drafter in drafters), plain


@pytest.mark.parametrize("requests", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("chances", [[0.02] * 8, [0.3] * 8, [0.7] * 8, [0.95] * 8])
def test_never_slower_with_any_number_of_requests(requests, chances):
    """Honest drafts at 100 microseconds a question, over texts of 100 steps."""
    spent, plain = together([SyntheticAcceptance(next_token, chances, VOCAB)], requests, 100, 1.0e-4)
    assert spent <= plain / 0.98
    if chances[0] == 0.95:
        assert plain / spent > {1: 4.0, 4: 1.6, 8: 1.1, 16: 1.0, 32: 0.98}[requests]


@pytest.mark.parametrize("requests", [1, 4, 8, 16, 32])
def test_a_liar_is_found_out_by_any_number_of_requests(requests):
    """It takes one pass to find out, and that one is dear."""
    spent, plain = together([Adversary(next_token, VOCAB)], requests, 600, 5.0e-5)
    assert spent <= plain / 0.98
