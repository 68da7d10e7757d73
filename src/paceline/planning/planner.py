"""What to check in the next pass: the likeliest tokens of all requests, while each is worth its time.

A pass over B requests with n draft rows takes T(B + n) seconds and commits B + sum(p) tokens, p being
the chance that a node and all its ancestors are taken. Of all sets of n nodes the n likeliest are best,
and they form trees by themselves, since a node is never likelier than its parent; so the best plan is
one of the prefixes of the nodes in order of p (the greedy solution of a fractional knapsack). T has
plateaus and steps, so all prefixes are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core import Context, Draft, Drafter, Outcome
from paceline.planning.merge import merge, select
from paceline.planning.pass_time import PassTime


def best_prefix(paths: Sequence[float], costs: Sequence[float], base: int, overhead: float = 0.0) -> int:
    """How many of the nodes, likeliest first, to buy.

    Args:
        paths: [n] path chances, descending.
        costs: [base + n + 1] seconds of a pass by row count.
        base: rows that are in the pass anyway, one per request.
        overhead: seconds of the step besides the pass.
    """
    best, count = base / (overhead + costs[base]), 0
    tokens = float(base)
    for n, path in enumerate(paths, 1):
        tokens += path
        rate = tokens / (overhead + costs[base + n])
        if rate > best:
            best, count = rate, n
    return count


@dataclass(slots=True)
class _Record:
    """What the planner knows about one request."""

    offered: int = 0
    bought: int = 0
    asked: int = 0
    no_room: int = 0
    credit: dict[str, float] = field(default_factory=dict)


class Planner:
    """Asks the drafters, prices what they offer, and says what to check.

    Args:
        pass_time: the target's pass times.
        drafters: asked in this order.
        max_draft: most draft nodes per request and pass.
        draft_length: exact number of draft nodes to take where they are offered; None means what pays.
        clock: seconds, for the price of asking.
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
        self._clock = clock
        self._records: dict[int, _Record] = {}

    def plan(self, contexts: Sequence[Context], rooms: Sequence[int]) -> list[Draft]:
        """Return what to check for each request, at most `rooms[i]` nodes; an empty draft is a plain step."""
        drafts = [self._ask(context, room) for context, room in zip(contexts, rooms, strict=True)]
        if not any(len(draft) for draft in drafts):
            return drafts
        nodes = [
            (-path, i, node)
            for i, draft in enumerate(drafts)
            for node, path in enumerate(draft.path_chances().tolist())
        ]
        nodes.sort()
        base = len(contexts)
        count = len(nodes)
        if self.draft_length is None:
            costs = self.pass_time.costs(base + len(nodes))
            count = best_prefix([-negative for negative, _, _ in nodes], costs, base)
        chosen: list[list[int]] = [[] for _ in drafts]
        for _, i, node in nodes[:count]:
            chosen[i].append(node)
        for i, context in enumerate(contexts):
            self._records[context.request].bought += len(chosen[i])
        return [select(draft, sorted(c)) for draft, c in zip(drafts, chosen, strict=True)]

    def observe(self, rows: int, context_tokens: int, seconds: float) -> None:
        """Learn from a pass over `rows` rows that took `seconds`."""
        del context_tokens  # the online correction follows the context length by itself
        self.pass_time.observe(rows, seconds)

    def commit(self, context: Context, outcome: Outcome | None) -> None:
        """Let the drafters follow the text; call after prefill and after every step."""
        for drafter in self.drafters:
            drafter.commit(context, outcome)

    def forget(self, context: Context) -> None:
        self._records.pop(context.request, None)
        for drafter in self.drafters:
            drafter.forget(context)

    def off_reason(self, context: Context) -> str | None:
        """Why nothing was drafted for this request so far; None if something was."""
        record = self._records.get(context.request)
        if not self.drafters:
            return "speculation is off"
        if record is None or not (record.asked or record.no_room):
            return "the request ended before a draft could be made"
        if record.bought:
            return None
        if not record.asked:
            return "the length limit left no room for a draft"
        if not record.offered:
            return "no drafter knew a continuation of this text"
        return "the drafts offered were not likely enough to pay for their time"

    def _ask(self, context: Context, room: int) -> Draft:
        record = self._records.setdefault(context.request, _Record())
        budget = min(room, self.max_draft)
        if budget <= 0:
            record.no_room += 1
            return Draft.empty()
        record.asked += 1
        draft = merge([drafter.propose(context, budget) for drafter in self.drafters])
        record.offered += len(draft)
        if len(draft) <= budget:
            return draft
        paths = draft.path_chances().tolist()
        return select(draft, sorted(sorted(range(len(draft)), key=lambda i: -paths[i])[:budget]))
