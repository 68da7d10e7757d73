"""Heads that draft trees, pass by pass, as far as these pay.

A head guesses the token after next from what the target made of the last one. From its own guess it goes on
with its own states, one pass per step, all requests together. Which guesses to follow is decided as in
EAGLE-2 (arXiv 2406.16858), by the chance of the whole path, but not to a fixed number of them: a guess is
followed while that is expected to earn more than it costs, and second choices stand beside the first where
they are worth a row of the target's pass. A request that samples is drafted for with its own noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.core import ROOT, Context, Floats
from paceline.drafters.head_program import FROM_ITSELF, FROM_TARGET, Feed, HeadProgram
from paceline.drafters.hearing import HeadSeat, StateDrafter
from paceline.drafters.network import Costs, Growth
from paceline.drafters.offer import Guess, Offer
from paceline.drafters.outlook import Outlook
from paceline.errors import RequestError
from paceline.sampling.sampler import Sampler

# How a guess was made, for its chance: the first or a later choice, the likeliest or a drawn one.
_FIRST, _RIVAL = 0, 2

TOPK = 4


@dataclass(slots=True)
class Place:
    """A row of the head that was computed: the text's last one, or a node's.

    Attributes:
        slot: where its KV lies; its position too, while it is on the line that needs no tree.
        given, made: [width] the states it started from and led to.
        sampler: as the request's will stand behind it.
    """

    token: int
    parent: int
    position: int
    slot: int
    straight: bool
    given: Floats
    made: Floats
    sampler: Sampler


@dataclass(slots=True)
class Tree(Growth[HeadSeat]):
    """A draft under way.

    Attributes:
        depth: of each node, from 0.
        reach: of each node, the chance of being reached and taken.
        places: rows by node, ROOT for the text's last one.
        leaves: nodes that were not followed yet.
        tip: the last row on the line from the text that lies in its own slots.
        aside: the next slot off that line.
    """

    depth: list[int] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    leaves: list[int] = field(default_factory=list)
    tip: int = ROOT
    aside: int = 0


class HeadDrafter(StateDrafter[Tree]):
    """Drafts trees with a head, pass by pass.

    Args:
        head: recorded in two parts; see `head_program`.
        topk: most guesses beside each other; 1 makes every draft a chain.
        name, layers, ids, ends, costs, clock: see `StateDrafter`.
    """

    def __init__(
        self,
        name: str,
        head: HeadProgram,
        layers: Sequence[int],
        ids: NDArray[np.int64] | None,
        ends: frozenset[int],
        costs: Costs,
        *,
        topk: int = TOPK,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(name, head, layers, ids, ends, costs, clock=clock)
        self.head = head
        self.topk = topk

    def _begin(self, context: Context, budget: int) -> Tree | None:
        seat = self._seats.get(context.request)
        if budget <= 0 or seat is None or not self.cache.ready(seat.track, context.tokens):
            return None
        self._follow(seat, context)
        self.cache.settle(seat.track, context.tokens)
        seat.offer = Offer()
        return Tree(seat, context, context.tokens, budget)

    def _grow(self, going: list[Tree], outlook: Outlook | None) -> None:
        for batch in self._batches(going):
            start = self._clock()
            rows = self._catch_up(batch, outlook)
            self._spend(rows, self._clock() - start, outlook)
        while chosen := self._choose(going, outlook):
            start = self._clock()
            rows = self._step(chosen, outlook)
            self._spend(rows, self._clock() - start, outlook)

    def _room(self, growth: Tree) -> int:
        # A tree has at most all its nodes on the line, and as many beside it.
        return 2 * growth.left + 1

    def _ahead(self) -> int:
        """Rows of a request's first pass that are not the text's."""
        return 0

    def _batches(self, going: list[Tree]) -> list[list[Tree]]:
        """All together if their missing rows fit into a pass, else each alone."""
        rows = sum(self.cache.missing(growth.seat.track, growth.context.tokens) for growth in going)
        rows += self._ahead() * len(going)
        if not going or rows <= self.head.max_rows:
            return [going] if going else []
        return [[growth] for growth in going]

    def _catch_up(self, going: Sequence[Tree], outlook: Outlook | None) -> int:
        """Compute what rows of committed text are missing, and offer first guesses; returns their number."""
        feeds = [self._missing(growth) for growth in going]
        for feed in feeds:
            self._read_ahead(feed, self.head.max_rows)
        result = self.head.run(feeds, FROM_TARGET)
        for w, (growth, feed) in enumerate(zip(going, feeds, strict=True)):
            track, at = growth.seat.track, feed.positions[-1]
            track.filed = len(growth.context.tokens) - 1 - track.done
            growth.aside = at + 1 + growth.left
            growth.places[ROOT] = Place(
                token=feed.tokens[-1],
                parent=ROOT,
                position=at,
                slot=at,
                straight=True,
                given=result.given[w].copy(),
                made=result.made[w].copy(),
                sampler=growth.seat.sampler.ahead(),
            )
            self._expand(growth, ROOT, result.logits[w], outlook)
        return sum(len(feed.tokens) for feed in feeds)

    def _read_ahead(self, feed: Feed, most: int) -> None:
        """Compute the front of a feed, so that at most so many rows are left."""
        while len(feed.tokens) > most:
            count = min(len(feed.tokens) - most, self.head.max_rows)
            self.head.run([_front(feed, count)], FROM_TARGET)
            _drop_front(feed, count)

    def _missing(self, growth: Tree) -> Feed:
        """The rows of committed text that are not in place; the last one is wanted."""
        track, tokens = growth.seat.track, growth.context.tokens
        assert track.sequence is not None
        first, rows = track.done, len(tokens) - 1
        assert track.waiting.first == first
        places = list(range(first - track.base, rows - track.base))
        return Feed(
            table=track.sequence.table,
            tokens=tokens[first + 1 :],
            positions=places,
            slots=places,
            parents=[ROOT] * len(places),
            states=track.waiting.all()[: rows - first],
            wanted=[len(places) - 1],
        )

    def _choose(self, going: Sequence[Tree], outlook: Outlook | None) -> list[tuple[Tree, list[int]]]:
        """The leaves to follow in the next pass, those of each growth likeliest first."""
        leaves = [(growth, leaf) for growth in going for leaf in growth.leaves if growth.left > 0]
        if outlook is not None:
            gains = [growth.reach[leaf] * growth.seat.hope for growth, leaf in leaves]
            leaves = [leaves[i] for i in outlook.onward(gains)]
        chosen: list[tuple[Tree, list[int]]] = []
        for growth in going:
            its = [leaf for owner, leaf in leaves if owner is growth]
            its.sort(key=lambda leaf: -growth.reach[leaf])
            if its := its[: growth.left]:
                chosen.append((growth, its))
        return chosen

    def _step(self, chosen: Sequence[tuple[Tree, list[int]]], outlook: Outlook | None) -> int:
        """Compute the rows of these leaves, and the guesses that follow them; returns how many rows."""
        groups: dict[int, list[tuple[Tree, list[int]]]] = {}
        for growth, leaves in chosen:
            for part in dict.fromkeys(self._part(growth, leaf) for leaf in leaves):
                some = [leaf for leaf in leaves if self._part(growth, leaf) == part]
                groups.setdefault(part, []).append((growth, some))
        return sum(self._pass(part, group, outlook) for part, group in sorted(groups.items()))

    def _part(self, growth: Tree, leaf: int) -> int:
        """The part of the head that computes a leaf's row: its own step's, or the last one."""
        return min(growth.depth[leaf] + FROM_ITSELF, self.head.parts - 1)

    def _pass(self, part: int, chosen: Sequence[tuple[Tree, list[int]]], outlook: Outlook | None) -> int:
        feeds = [self._branches(growth, leaves) for growth, leaves in chosen]
        result = self.head.run(feeds, part)
        w = 0
        for growth, leaves in chosen:
            for leaf in leaves:
                growth.places[leaf].made = result.made[w].copy()
                growth.leaves.remove(leaf)
                self._expand(growth, leaf, result.logits[w], outlook)
                w += 1
        return sum(len(feed.tokens) for feed in feeds)

    def _branches(self, growth: Tree, leaves: Sequence[int]) -> Feed:
        """Rows for leaves, and for those rows before them that a tree's rows must find in the same pass."""
        rows: dict[int, int] = {}
        parents: list[int] = []

        def include(node: int) -> int:
            if node not in rows:
                place = growth.places[node]
                above = ROOT if place.straight else include(place.parent)
                rows[node] = len(rows)
                parents.append(above)
            return rows[node]

        for leaf in leaves:
            self._place(growth, leaf)
            include(leaf)
        places = [growth.places[node] for node in rows]
        sequence = growth.seat.track.sequence
        assert sequence is not None
        return Feed(
            table=sequence.table,
            tokens=[place.token for place in places],
            positions=[place.position for place in places],
            slots=[place.slot for place in places],
            parents=parents,
            states=np.stack([place.given for place in places]) if len(places) > 1 else places[0].given[None],
            wanted=[rows[leaf] for leaf in leaves],
        )

    def _place(self, growth: Tree, leaf: int) -> None:
        """Give a leaf's row its slot: the next one where it goes on from the tip, else one aside."""
        token, parent = growth.seat.offer.tokens[leaf], growth.seat.offer.parents[leaf]
        before = growth.places[parent]
        straight = parent == growth.tip
        position = before.position + 1
        sampler = before.sampler
        if sampler.needs_logits:  # else what was written decides nothing
            sampler = sampler.ahead()
            sampler.advance(token)
        slot = position if straight else growth.aside
        growth.places[leaf] = Place(
            token, parent, position, slot, straight, before.made, before.made, sampler
        )
        if straight:
            growth.tip = leaf
        else:
            growth.aside += 1

    def _expand(self, growth: Tree, node: int, logits: Floats, outlook: Outlook | None) -> None:
        """Offer what follows a row: its first choice, and others beside it where they pay."""
        place, above = growth.places[node], 1.0 if node == ROOT else growth.reach[node]
        depth = 0 if node == ROOT else growth.depth[node] + 1
        position = len(growth.context.tokens) + depth
        guesses: list[Guess] = []
        left = 1.0
        while growth.left > 0 and len(guesses) < self.topk:
            if guesses and (outlook is None or not outlook.worthwhile(above * left)):
                break
            try:
                own, probability = self._choices.pick(logits, place.sampler, position)
            except RequestError:  # the target will say so, if it comes to the same
                break
            logits[own] = -np.inf
            token = self._target_ids[own]
            kind = (_RIVAL if guesses else _FIRST) + (not growth.context.params.greedy)
            features = self.calibration.features(kind, probability, depth)
            chance = self.calibration.chance(features, growth.seat.luck.log_odds)
            guesses.append((token, chance, features))
            reach = above * left * chance
            if len(guesses) == 1:
                self._learn_hope(growth.seat, chance)
            elif outlook is not None and not outlook.worthwhile(reach):
                break
            if outlook is not None:
                outlook.add(reach)
            self._offer_node(growth, node, token, left * chance, reach, depth)
            left *= 1.0 - chance
            if not np.isfinite(logits.max()):
                break
        growth.seat.offer.guesses[node] = guesses

    def _offer_node(
        self, growth: Tree, parent: int, token: int, chance: float, reach: float, depth: int
    ) -> None:
        node = growth.seat.offer.add(parent, token, chance)
        growth.left -= 1
        growth.reach.append(reach)
        growth.depth.append(depth)
        if growth.context.params.ignore_eos or token not in self._ends:
            growth.leaves.append(node)


def _front(feed: Feed, count: int) -> Feed:
    """The first rows of a feed; none of them is wanted."""
    return Feed(
        feed.table,
        feed.tokens[:count],
        feed.positions[:count],
        feed.slots[:count],
        feed.parents[:count],
        feed.states[:count],
        [],
    )


def _drop_front(feed: Feed, count: int) -> None:
    feed.tokens, feed.states = feed.tokens[count:], feed.states[count:]
    feed.positions, feed.slots = feed.positions[count:], feed.slots[count:]
    feed.parents = feed.parents[count:]
    feed.wanted = [len(feed.tokens) - 1]
