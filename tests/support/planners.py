"""Planners that buy whatever they are told to, so that a test decides the drafts and not their price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core import ROOT, Context, Draft, Drafter, Floats, HearingDrafter, Outcome


class FixedPlanner:
    """Asks one drafter for exactly `length` nodes (the room permitting) and buys them all.

    Attributes:
        forgotten: requests that are over.
        rooms: the rooms of every call so far.
    """

    speculates = True

    def __init__(self, drafter: Drafter | None = None, length: int = 4) -> None:
        self.drafter = drafter
        self.length = length
        self.forgotten: list[int] = []
        self.rooms: list[int] = []
        self.outcomes: list[Outcome] = []

    def plan(
        self, contexts: Sequence[Context], rooms: Sequence[int], *, decoding: int = 1, base_rows: int = 1
    ) -> list[Draft]:
        assert 0 < decoding <= base_rows
        self.rooms += rooms
        if self.drafter is None:
            return [Draft.empty() for _ in contexts]
        return [self._ask(self.drafter, c, min(r, self.length)) for c, r in zip(contexts, rooms, strict=True)]

    def _ask(self, drafter: Drafter, context: Context, budget: int) -> Draft:
        before = list(context.tokens)
        draft = drafter.propose(context, budget) if budget else Draft.empty()
        assert context.tokens == before, "a drafter changed the text"
        assert len(draft) <= budget
        return draft

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(getattr(self.drafter, "layers", ()))

    def hear(self, context: Context, start: int, hidden: Mapping[int, Floats]) -> None:
        assert isinstance(self.drafter, HearingDrafter)
        self.drafter.hear(context, start, hidden)

    def commit(self, context: Context, outcome: Outcome | None) -> None:
        if outcome is not None:
            _check_outcome(context, outcome)
            self.outcomes.append(outcome)
        if self.drafter is not None:
            self.drafter.commit(context, outcome)

    def forget(self, context: Context) -> None:
        self.forgotten.append(context.request)
        if self.drafter is not None:
            self.drafter.forget(context)

    def off_reason(self, context: Context) -> str | None:
        return "no drafter" if self.drafter is None else "nothing was drafted"


def _check_outcome(context: Context, outcome: Outcome) -> None:
    assert len(outcome.draft) > 0
    assert list(outcome.committed) == context.tokens[-len(outcome.committed) :]
    assert len(outcome.committed) - len(outcome.path) in (0, 1)
    parent = ROOT
    for node, token in zip(outcome.path, outcome.committed, strict=False):
        assert outcome.draft.parents[node] == parent
        assert outcome.draft.tokens[node] == token
        parent = node
