"""What all heads have in common: they hear the target's states, and draft trees as far as these pay.

A head guesses the token after next from what the target made of the last one. From its own guess it goes on
with its own states, one pass per step, all requests together. Which guesses to follow is decided as in
EAGLE-2 (arXiv 2406.16858), by the chance of the whole path, but not to a fixed number of them: a guess is
followed while that is expected to earn more than it costs, and second choices stand beside the first where
they are worth a row of the target's pass. A request that samples is drafted for with its own noise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core import ROOT, Context, Draft, Floats, Outcome, Prices
from paceline.drafters.calibration import Confidence, Luck
from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.choice import Subset, request_sampler
from paceline.drafters.head_cache import Follower, HeadCache, Track
from paceline.drafters.head_program import FROM_ITSELF, FROM_TARGET, Feed, HeadProgram, Lender
from paceline.drafters.memory import Remembering
from paceline.drafters.model import Costs
from paceline.drafters.offer import Guess, Offer
from paceline.drafters.outlook import Hope, Outlook
from paceline.errors import PacelineError, RequestError
from paceline.sampling.sampler import Sampler

_log = logging.getLogger("paceline")

# How a guess was made, for its chance: the first or a later choice, the likeliest or a drawn one.
_FIRST, _RIVAL, _KINDS = 0, 2, 4

MOST_SIBLINGS = 4
_FIRST_HOPE = 0.6
_HOPE_RATE, _HOPE_RATE_OF_ALL = 0.1, 0.02

_CURIOSITY = 0.9
"""What is hoped for before a head has made so FEW guesses: if it can pay at all it is tried, to be judged."""

_FEW = 2

_FIRST_LENGTH = 128.0


class Average:
    """A running mean: of all values as long as they are few, then of the latest.

    Args:
        value: to start from; counts as much as one.
        rate: of the latest.
    """

    __slots__ = ("_rate", "seen", "value")

    def __init__(self, value: float, rate: float) -> None:
        self.value = value
        self.seen = 0
        self._rate = rate

    def add(self, value: float) -> None:
        self.seen += 1
        self.value += max(self._rate, 1.0 / (1 + self.seen)) * (value - self.value)


@dataclass(slots=True)
class Seat:
    """What is remembered of one request.

    Attributes:
        length: tokens of the text that were followed.
        hopes: average chance of its first guesses lately.
    """

    sampler: Sampler
    hopes: Average
    track: Track = field(default_factory=Track)
    luck: Luck = field(default_factory=Luck)
    offer: Offer = field(default_factory=Offer)
    length: int = 0


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
class Growth:
    """A draft under way.

    Attributes:
        left: how many nodes it may still get.
        depth: of each node, from 0.
        reach: of each node, the chance of being reached and taken.
        places: rows by node, ROOT for the text's last one.
        leaves: nodes that were not followed yet.
        tip: the last row on the line from the text that lies in its own slots.
        aside: the next slot off that line.
    """

    seat: Seat
    context: Context
    left: int
    depth: list[int] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    leaves: list[int] = field(default_factory=list)
    tip: int = ROOT
    aside: int = 0


class Network(Follower, Protocol):
    """The weights that a drafter runs, and the pages of its cache."""

    checkpoint: Checkpoint
    lender: Lender


class StateDrafter(Remembering):
    """Base of drafters that read the target's states; implements `core.HearingDrafter`, `core.CostlyDrafter`.

    Args:
        name: of the drafter.
        network: what it runs.
        layers: of the target, whose inputs it reads, in its order.
        ids: [its vocabulary] the target's id of each of its own, None where they are the same.
        ends: the target's end tokens.
        costs: pass times of the network.
        clock: seconds.

    Attributes:
        broken: what ended drafting for good, None while it works.
    """

    calibration: Confidence

    def __init__(
        self,
        name: str,
        network: Network,
        layers: Sequence[int],
        ids: NDArray[np.int64] | None,
        ends: frozenset[int],
        costs: Costs,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.network = network
        self.layers = tuple(sorted(set(layers)))
        self.cache = HeadCache(network)
        self.broken: str | None = None
        self.costs = costs
        self._order = tuple(layers)
        self._vocab = network.lender.vocab_size
        ids = np.arange(self._vocab) if ids is None else ids
        self._choices = Subset(ids, self._vocab)
        self._target_ids: list[int] = ids.tolist()
        self._ends = ends
        self._clock = clock
        self.reset()

    def describe(self) -> str:
        """One line for people: what was loaded."""
        return self.network.checkpoint.describe()

    def reset(self) -> None:
        """Forget all text and all that was learnt; also after an interruption."""
        self.calibration = Confidence(_KINDS)
        self._hopes = Average(_FIRST_HOPE, _HOPE_RATE_OF_ALL)
        self._mean_length = _FIRST_LENGTH
        self._seats: dict[int, Seat] = {}
        self.cache.clear()

    def hear(self, context: Context, start: int, hidden: Mapping[int, Floats]) -> None:
        if self.broken is None:
            states = np.concatenate([hidden[layer] for layer in self._order], axis=1)
            self._seat(context).track.waiting.add(start, states)

    def propose(self, context: Context, budget: int) -> Draft:
        return self.propose_many([context], [budget], None)[0]

    def propose_many(
        self, contexts: Sequence[Context], budgets: Sequence[int], prices: Prices | None
    ) -> list[Draft]:
        drafts = [Draft.empty()] * len(contexts)
        if self.broken is not None:
            return drafts
        outlook = None if prices is None else self._outlook(prices)
        growths = [self._begin(c, b) for c, b in zip(contexts, budgets, strict=True)]
        asked = [i for i, growth in enumerate(growths) if growth is not None]
        if outlook is not None:
            hopes = [self._expect(growth) for growth in growths if growth is not None]
            asked = [asked[i] for i in outlook.open(hopes)]
        going = self._seated([growth for i in asked if (growth := growths[i]) is not None])
        try:
            self._grow(going, outlook)
        except PacelineError as error:
            self._break(error)
            return drafts
        for i in asked:
            growth = growths[i]
            if growth is not None:
                drafts[i] = growth.seat.offer.draft(self.name)
        return drafts

    def price(self, context: Context) -> float:
        seat = self._seats.get(context.request)
        rows = len(context.tokens) if seat is None else self.cache.missing(seat.track, context.tokens)
        return self.costs.cost(rows)

    def commit(self, context: Context, outcome: Outcome | None) -> None:  # noqa: ARG002
        seat = self._seats.get(context.request)
        if seat is not None and seat.offer.guesses:
            self._follow(seat, context)

    def forget(self, context: Context) -> None:
        seat = self._seats.pop(context.request, None)
        if seat is not None:
            self._follow(seat, context)
            self.cache.settle(seat.track, context.tokens)
            self.cache.release(seat.track)
        length = len(context.tokens) - context.prompt_length
        self._mean_length += 0.1 * (length - self._mean_length)

    def _resume_hope(self, hope: float, hoped: int) -> None:
        self._hopes.value, self._hopes.seen = hope, hoped

    def _hope_so_far(self) -> tuple[float, int]:
        return self._hopes.value, self._hopes.seen

    # --- for the drafters themselves ---

    def _grow(self, going: list[Growth], outlook: Outlook | None) -> None:
        """Fill the offers of these growths, as far as it pays, or to the end without an outlook."""
        raise NotImplementedError

    def _room(self, growth: Growth) -> int:
        """Slots that a draft takes behind the text."""
        raise NotImplementedError

    def _outlook(self, prices: Prices) -> Outlook:
        return Outlook(prices, self.costs.cost)

    def _spend(self, rows: int, seconds: float, outlook: Outlook | None) -> None:
        self.costs.observe(rows, seconds)
        if outlook is not None:
            outlook.spent += seconds

    def _seat(self, context: Context) -> Seat:
        seat = self._seats.get(context.request)
        if seat is None:
            sampler = request_sampler(context, self._vocab, self._ends)
            seat = self._seats[context.request] = Seat(sampler, Average(self._hopes.value, _HOPE_RATE))
        return seat

    def _begin(self, context: Context, budget: int) -> Growth | None:
        seat = self._seats.get(context.request)
        if budget <= 0 or seat is None or not self.cache.ready(seat.track, context.tokens):
            return None
        self._follow(seat, context)
        self.cache.settle(seat.track, context.tokens)
        seat.offer = Offer()
        return Growth(seat, context, budget)

    def _follow(self, seat: Seat, context: Context) -> None:
        """Learn what became of the last guesses, and take in what was written."""
        written = context.tokens[seat.length :]
        if not written:
            return
        if seat.length:
            seat.offer.learn(written, self.calibration, seat.luck)
        seat.offer = Offer()
        for token in written[max(0, context.prompt_length - seat.length) :]:
            seat.sampler.advance(token)
        seat.length = len(context.tokens)

    def _expect(self, growth: Growth) -> Hope:
        seat, context = growth.seat, growth.context
        written = len(context.tokens) - context.prompt_length
        most = context.params.max_tokens
        left = self._mean_length if most is None else min(self._mean_length, most - written)
        rows = self.cache.missing(seat.track, context.tokens)
        hope = seat.hopes.value if self._hopes.seen >= _FEW else max(_CURIOSITY, seat.hopes.value)
        return Hope(hope, growth.left, rows, left * (1.0 - hope))

    def _seated(self, growths: Sequence[Growth]) -> list[Growth]:
        """Those that find room in the cache."""
        seated: list[Growth] = []
        for growth in growths:
            busy = [other.seat.track for other in seated]
            if self.cache.open(growth.context, growth.seat.track, self._room(growth), busy):
                seated.append(growth)
        return seated

    def _learn_hope(self, seat: Seat, chance: float) -> None:
        seat.hopes.add(chance)
        self._hopes.add(chance)

    def _break(self, error: PacelineError) -> None:
        self.broken = error.message
        _log.warning("the %s head is of no use and stays off: %s", self.name, error.message)
        self.reset()


class HeadDrafter(StateDrafter):
    """Drafts trees with a head, pass by pass.

    Args:
        head: recorded in two parts; see `head_program`.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(name, head, layers, ids, ends, costs, clock=clock)
        self.head = head

    def _grow(self, going: list[Growth], outlook: Outlook | None) -> None:
        for batch in self._batches(going):
            start = self._clock()
            rows = self._catch_up(batch, outlook)
            self._spend(rows, self._clock() - start, outlook)
        while chosen := self._choose(going, outlook):
            start = self._clock()
            rows = self._step(chosen, outlook)
            self._spend(rows, self._clock() - start, outlook)

    def _room(self, growth: Growth) -> int:
        # A tree has at most all its nodes on the line, and as many beside it.
        return 2 * growth.left + 1

    def _ahead(self) -> int:
        """Rows of a request's first pass that are not the text's."""
        return 0

    def _batches(self, going: list[Growth]) -> list[list[Growth]]:
        """All together if their missing rows fit into a pass, else each alone."""
        rows = sum(self.cache.missing(growth.seat.track, growth.context.tokens) for growth in going)
        rows += self._ahead() * len(going)
        if not going or rows <= self.head.max_rows:
            return [going] if going else []
        return [[growth] for growth in going]

    def _catch_up(self, going: Sequence[Growth], outlook: Outlook | None) -> int:
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

    def _missing(self, growth: Growth) -> Feed:
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

    def _choose(self, going: Sequence[Growth], outlook: Outlook | None) -> list[tuple[Growth, list[int]]]:
        """The leaves to follow in the next pass, those of each growth likeliest first."""
        leaves = [(growth, leaf) for growth in going for leaf in growth.leaves if growth.left > 0]
        if outlook is not None:
            gains = [growth.reach[leaf] * growth.seat.hopes.value for growth, leaf in leaves]
            leaves = [leaves[i] for i in outlook.onward(gains)]
        chosen: list[tuple[Growth, list[int]]] = []
        for growth in going:
            its = [leaf for owner, leaf in leaves if owner is growth]
            its.sort(key=lambda leaf: -growth.reach[leaf])
            if its := its[: growth.left]:
                chosen.append((growth, its))
        return chosen

    def _step(self, chosen: Sequence[tuple[Growth, list[int]]], outlook: Outlook | None) -> int:
        """Compute the rows of these leaves, and the guesses that follow them; returns how many rows."""
        groups: dict[int, list[tuple[Growth, list[int]]]] = {}
        for growth, leaves in chosen:
            for part in dict.fromkeys(self._part(growth, leaf) for leaf in leaves):
                some = [leaf for leaf in leaves if self._part(growth, leaf) == part]
                groups.setdefault(part, []).append((growth, some))
        return sum(self._pass(part, group, outlook) for part, group in sorted(groups.items()))

    def _part(self, growth: Growth, leaf: int) -> int:
        """The part of the head that computes a leaf's row: its own step's, or the last one."""
        return min(growth.depth[leaf] + FROM_ITSELF, self.head.parts - 1)

    def _pass(self, part: int, chosen: Sequence[tuple[Growth, list[int]]], outlook: Outlook | None) -> int:
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

    def _branches(self, growth: Growth, leaves: Sequence[int]) -> Feed:
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

    def _place(self, growth: Growth, leaf: int) -> None:
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

    def _expand(self, growth: Growth, node: int, logits: Floats, outlook: Outlook | None) -> None:
        """Offer what follows a row: its first choice, and others beside it where they pay."""
        place, above = growth.places[node], 1.0 if node == ROOT else growth.reach[node]
        depth = 0 if node == ROOT else growth.depth[node] + 1
        position = len(growth.context.tokens) + depth
        guesses: list[Guess] = []
        left = 1.0
        while growth.left > 0 and len(guesses) < MOST_SIBLINGS:
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
        self, growth: Growth, parent: int, token: int, chance: float, reach: float, depth: int
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
