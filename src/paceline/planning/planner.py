"""What to check in the next pass: the likeliest tokens of all requests, while each is worth its time.

A pass over B requests with n draft rows takes T(B + n) seconds and commits B + sum(p) tokens, p being
the chance that a node and all its ancestors are taken. Of all sets of n nodes the n likeliest are best,
and they form trees by themselves, since a node is never likelier than its parent; so the best plan is
one of the prefixes of the nodes in order of p (the greedy solution of a fractional knapsack). T has
plateaus and steps, so all prefixes are compared.

Rows of prompts, and drafts that another planner bought, pay for themselves: a draft is bought for what it
adds to the pass they are in, and must beat the rate of a pass without them. When many requests share a
pass its rows are no longer cheap, fewer and fewer drafts are worth one, and in a full pass nobody is asked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core import (
    ROOT,
    Context,
    CostlyDrafter,
    Draft,
    Drafter,
    Floats,
    HearingDrafter,
    Outcome,
    Prices,
)
from paceline.planning.credit import Account, Stake, Trust
from paceline.planning.merge import allowed, merge, select
from paceline.planning.pass_time import PassTime
from paceline.planning.prices import RowPrices
from paceline.planning.venture import Venture

_NOTHING = Draft.empty()

_PROBE = 16
"""If not even so many certain tokens would pay, no drafter is asked."""


def _serves(drafter: Drafter, context: Context) -> bool:
    """Whether a drafter can ever have anything for a request; those that live on what few bring say so."""
    serves = getattr(drafter, "serves", None)
    return serves is None or bool(serves(context))


@dataclass(slots=True)
class _Record:
    """What the planner knows about one request."""

    accounts: dict[str, Account]
    stake: Stake = field(default_factory=Stake)
    crowded: bool = False
    asked: int = 0
    offered: int = 0
    bought: int = 0


class Planner:
    """Asks the drafters, prices what they offer, and says what to check.

    Args:
        pass_time: the target's pass times.
        drafters: asked in this order.
        max_draft: most draft nodes per request and pass.
        draft_length: exact number of draft nodes to take where so many are offered; None means what pays.
        clock: seconds, for the price of asking.

    Attributes:
        layers: of the target whose inputs the drafters read.
    """

    def __init__(
        self,
        pass_time: PassTime,
        drafters: Sequence[Drafter],
        *,
        max_draft: int = 15,
        draft_length: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pass_time = pass_time
        self.drafters = list(drafters)
        self.max_draft = max_draft if draft_length is None else draft_length
        self.draft_length = draft_length
        self._hearing = [drafter for drafter in self.drafters if isinstance(drafter, HearingDrafter)]
        self.layers = frozenset(layer for drafter in self._hearing for layer in drafter.layers)
        self._clock = clock
        self._records: dict[int, _Record] = {}
        self._trust = {drafter.name: Trust() for drafter in self.drafters}
        self._costly: dict[str, CostlyDrafter] = {
            drafter.name: drafter for drafter in self.drafters if isinstance(drafter, CostlyDrafter)
        }
        self._ventures = {name: Venture() for name in self._costly}
        self._staked: dict[int, dict[str, float]] = {}  # plain tokens that bought rows cost, by source

    @property
    def speculates(self) -> bool:
        return len(self.drafters) > 0

    def plan(
        self,
        contexts: Sequence[Context],
        rooms: Sequence[int],
        *,
        decoding: int | None = None,
        base_rows: int | None = None,
    ) -> list[Draft]:
        """Return what to check for each request, at most `rooms[i]` nodes; an empty draft is a plain step.

        Args:
            decoding: requests that write in the pass, these among them; None means these alone.
            base_rows: rows of the pass besides what is bought here: one for each of those, prompt rows,
                drafts bought by others; None means one each.
        """
        if not self.drafters:
            return [_NOTHING] * len(contexts)
        prices = RowPrices(self.pass_time, decoding or len(contexts), base_rows or len(contexts))
        if self.draft_length is None and prices.decoding > 1 and not prices.buy([1.0] * _PROBE):
            for context in contexts:
                self._record(context).crowded = True
            return [_NOTHING] * len(contexts)
        drafts = [self._ask(c, room, prices.token) for c, room in zip(contexts, rooms, strict=True)]
        for drafter in self._costly.values():
            drafts = self._consult(drafter, contexts, rooms, drafts, prices)
        paths = [self._paths(draft) if len(draft) else [] for draft in drafts]
        nodes = [(-path, i, node) for i, some in enumerate(paths) for node, path in enumerate(some)]
        if not nodes:
            return drafts
        nodes.sort()
        prices.reach(len(nodes))
        if self.draft_length is None:
            del nodes[prices.buy([-node[0] for node in nodes]) :]
        chosen: list[list[int]] = [[] for _ in contexts]
        for _, owner, node in nodes:
            chosen[owner].append(node)
        return [
            self._take(context.request, draft, some, its, prices.behind(len(nodes) - len(its)))
            if its
            else _NOTHING
            for context, draft, some, its in zip(contexts, drafts, paths, chosen, strict=True)
        ]

    def hear(self, context: Context, start: int, hidden: Mapping[int, Floats]) -> None:
        """Hand the target's states of the tokens from `start` on to the drafters that read them."""
        for drafter in self._hearing:
            drafter.hear(context, start, hidden)

    def commit(self, context: Context, outcome: Outcome | None) -> None:
        """Let the drafters follow the text; call after prefill and after every step."""
        if outcome is not None and self.draft_length is None:
            chances = outcome.draft.chances
            for node, hit in outcome.tested:
                if trust := self._trust.get(outcome.draft.sources[node]):
                    trust.record(chances[node], hit)
        if record := self._records.get(context.request):
            record.stake.settle(len(outcome.path) if outcome else 0)
        if self._costly:
            self._settle(context, outcome)
        for drafter in self.drafters:
            drafter.commit(context, outcome)

    def forget(self, context: Context) -> None:
        """The request is over."""
        self._records.pop(context.request, None)
        self._staked.pop(context.request, None)
        for venture in self._ventures.values():
            venture.forget(context.request)
        for drafter in self.drafters:
            drafter.forget(context)

    def close(self) -> None:
        """Let drafters that keep something between runs write it down."""
        for drafter in self.drafters:
            if callable(close := getattr(drafter, "close", None)):
                close()

    def off_reason(self, context: Context) -> str | None:
        """Why nothing was drafted for this request so far; None if something was."""
        if not self.drafters:
            return "speculation is off"
        record = self._records.get(context.request)
        if record is not None and record.crowded and not record.bought:
            return "so many requests shared each pass that no draft could have been worth its time"
        if record is None or not record.asked:
            return "the text ended before a draft could be made"
        if record.bought:
            return None
        if not record.offered and not self._costly:
            return "no drafter knew how this text might go on"
        return "no draft was likely enough to be worth its time"

    def _record(self, context: Context) -> _Record:
        record = self._records.get(context.request)
        if record is None:
            cheap = [d for d in self.drafters if d.name not in self._costly and _serves(d, context)]
            accounts = {drafter.name: Account() for drafter in cheap}
            record = self._records[context.request] = _Record(accounts)
        return record

    def _ask(self, context: Context, room: int, token: float) -> Draft:
        """Ask the drafters for one request; a plain token takes `token` seconds."""
        budget = min(room, self.max_draft)
        if budget <= 0:
            return _NOTHING
        record = self._record(context)
        if not record.accounts:
            record.asked += 1
            return _NOTHING
        offers: list[Draft] = []
        for drafter in self.drafters:
            account = record.accounts.get(drafter.name)
            if account is None:
                continue
            if self.draft_length or account.may_ask(token):
                start = self._clock()
                offers.append(allowed(drafter.propose(context, budget), context.constraint))
                account.asked(self._clock() - start)
        record.asked += 1
        return self._within(merge(offers), budget, record)

    def _within(self, draft: Draft, budget: int, record: _Record) -> Draft:
        """The likeliest `budget` nodes."""
        record.offered += len(draft)
        if len(draft) <= budget:
            return draft
        paths = self._paths(draft)
        likeliest = sorted(range(len(draft)), key=lambda i: (-paths[i], i))
        return select(draft, sorted(likeliest[:budget]))

    def _consult(
        self,
        drafter: CostlyDrafter,
        contexts: Sequence[Context],
        rooms: Sequence[int],
        drafts: list[Draft],
        prices: RowPrices,
    ) -> list[Draft]:
        """Ask a drafter that costs passes of its own, for all requests that nothing better is known for."""
        venture = self._ventures[drafter.name]
        trusted = [venture.may_ask(context.request) or self.draft_length is not None for context in contexts]
        if not venture.may_probe and not any(trusted):
            return drafts
        budgets = [min(room, self.max_draft) for room in rooms]
        open_ = [i for i, room in enumerate(budgets) if room > 0 and self._expected(drafts[i]) < 1.0]
        asked = [i for i in open_ if trusted[i]]
        offers: list[Draft] = []
        start = self._clock()
        if asked:
            prices.reach(sum(budgets[i] for i in asked))
            terms = Prices(prices.plain, prices.decoding, prices.extra) if self.draft_length is None else None
            offers = drafter.propose_many([contexts[i] for i in asked], [budgets[i] for i in asked], terms)
        spent = self._clock() - start
        drafted = [i for i, offer in zip(asked, offers, strict=True) if len(offer)]
        for i in drafted or asked:
            venture.settle(contexts[i].request, -spent / prices.token / len(drafted or asked))
        found = dict(zip(asked, offers, strict=True))
        for i, offer in found.items():
            venture.answered(contexts[i].request, len(offer) > 0)
        if open_ and not drafted:
            found |= self._probe(drafter, venture, open_, contexts, prices)
        prices.plain += spent
        merged = list(drafts)
        for i, offer in found.items():
            record = self._record(contexts[i])
            record.asked += 1
            offer = merge([drafts[i], allowed(offer, contexts[i].constraint)])
            merged[i] = self._within(offer, budgets[i], record)
        return merged

    def _probe(
        self,
        drafter: CostlyDrafter,
        venture: Venture,
        open_: Sequence[int],
        contexts: Sequence[Context],
        prices: RowPrices,
    ) -> dict[int, Draft]:
        """Draft one token all the same, for the request that it is cheapest for, once enough is saved up."""
        if not venture.may_probe:
            return {}
        costs = {i: drafter.price(contexts[i]) / prices.token for i in open_}
        cheapest = min(open_, key=lambda i: costs[i])
        if costs[cheapest] > venture.probes:
            venture.least = costs[cheapest]
            return {}
        venture.least = 0.0
        start = self._clock()
        offer = drafter.propose(contexts[cheapest], 1)
        venture.probes -= (self._clock() - start) / prices.token
        venture.answered(contexts[cheapest].request, len(offer) > 0)
        return {cheapest: offer}

    def _settle(self, context: Context, outcome: Outcome | None) -> None:
        """Pay costly drafters for what was accepted of theirs, less what their rows cost."""
        staked = self._staked.pop(context.request, {})
        sources = [outcome.draft.sources[node] for node in outcome.path] if outcome else []
        for name, venture in self._ventures.items():
            won = sources.count(name) - staked.get(name, 0.0)
            if won:
                venture.settle(context.request, won)

    def _take(
        self,
        request: int,
        draft: Draft,
        paths: Sequence[float],
        chosen: list[int],
        prices: RowPrices,
    ) -> Draft:
        """What one request gets of the nodes chosen for it, likeliest first, as far as its stake allows."""
        record = self._records[request]
        # What costly drafters may lose, rows included, is up to their purses.
        if self.draft_length is None and self._costly.keys().isdisjoint(draft.sources):
            del chosen[_affordable(record.stake, draft, paths, chosen, prices) :]
        record.bought += len(chosen)
        earned: dict[str, float] = {}
        for node in chosen:
            row = prices.extra[len(chosen)] / len(chosen)
            source = draft.sources[node]
            earned[source] = earned.get(source, 0.0) + paths[node] * prices.token - row
        for source, seconds in earned.items():  # the time that its nodes save, net of their rows' own
            if account := record.accounts.get(source):
                account.earn(seconds)
        if self._costly and chosen:
            row = prices.extra[len(chosen)] / len(chosen) / prices.token
            counts = Counter(draft.sources[node] for node in chosen)
            self._staked[request] = {source: count * row for source, count in counts.items()}
        return select(draft, sorted(chosen))

    def _expected(self, draft: Draft) -> float:
        """Tokens that a draft will bring."""
        return sum(self._paths(draft)) if len(draft) else 0.0

    def _paths(self, draft: Draft) -> list[float]:
        """[n] chance of each node to be reached and taken, as far as its drafters are trusted."""
        paths = list(draft.chances)
        for i, parent in enumerate(draft.parents):
            if trust := self._trust.get(draft.sources[i]):
                paths[i] *= trust.factor
            if parent != ROOT:
                paths[i] *= paths[parent]
        return paths


def _affordable(
    stake: Stake, draft: Draft, paths: Sequence[float], chosen: Sequence[int], prices: RowPrices
) -> int:
    """How many of the chosen nodes a request's stake allows."""
    costs, misses, gains, miss, gain = [], [], [], 1.0, 0.0
    for n, node in enumerate(chosen, 1):
        gain += paths[node]
        if draft.parents[node] == ROOT:
            miss -= paths[node]
        costs.append(prices.extra[n] / prices.token)
        misses.append(miss)
        gains.append(gain)
    return stake.afford(costs, misses, gains)
