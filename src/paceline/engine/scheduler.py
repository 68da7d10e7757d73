"""Who takes part in the next pass, and with how many rows.

Every running request takes part in every pass while it decodes: one row and its draft. Prompts are
computed beside them in chunks, no longer than what a newcomer can be asked to wait for: a part for the
oldest prompt, so that it always gets on, the rest to whoever needs least. When pages run out, the youngest
request goes back to the queue and is recomputed later; the oldest always gets on there too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from paceline.core import Draft
from paceline.engine.counters import Counters
from paceline.engine.request import Planner, Request
from paceline.engine.step import Work
from paceline.models.kv import KVCache, KVSequence
from paceline.planning.pass_time import PassTime

NEWCOMER = 20
"""Rows of a short question. It must not wait long, whatever else is being read."""

PATIENCE = 1.4
"""A pass with prompt rows takes at most this many times what a newcomer takes alone, or the running texts
without it. So a newcomer, who waits for one pass and shares the next, has its answer begun in twice that."""

LEAST_CHUNK = 8
"""Prompt rows of a pass, at least: below, the pass would be spent on reading weights."""

OLDEST_SHARE = 6
"""One row in so many is the oldest prompt's."""

_EMPTY = Draft.empty()


class Scheduler:
    """The queue, the running requests, and their pages.

    Args:
        cache: pages of all requests.
        counters: moved on by preemptions and by prompts found in the cache.
        fail: ends a request because of an error, and removes it here.
        max_rows: most rows of a pass.
        max_num_seqs: most running requests.
        pass_time: prices chunks; None means that a chunk may fill the pass.

    Attributes:
        expecting: somebody may come at any moment, so that even a lone prompt is read in short passes.
    """

    def __init__(
        self,
        cache: KVCache,
        counters: Counters,
        fail: Callable[[Request, Exception], None],
        *,
        max_rows: int,
        max_num_seqs: int,
        pass_time: PassTime | None = None,
    ) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.max_num_seqs = max_num_seqs
        self.pass_time = pass_time
        self.expecting = False
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self._counters = counters
        self._fail = fail
        self._full = False  # the head of the queue did not fit, and nothing was freed since

    def clear(self) -> None:
        """Forget every request; their pages are void."""
        self.running.clear()
        self.waiting.clear()
        self.cache.clear()
        self._full = False

    def remove(self, request: Request) -> None:
        """Let go of a request, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)

    def schedule(self) -> list[Work]:
        """The next pass, slots reserved; empty if nobody can run."""
        self._admit()
        for request in list(self.running):
            if request in self.running:
                self._secure(request)
        decoding = [request for request in self.running if request.decoding]
        prefills = self._prefills(len(decoding))
        return [*self._decodes(decoding, sum(work.rows for work in prefills)), *prefills]

    def _admit(self) -> None:
        if self._full:
            return
        held_back: list[Request] = []
        while self.waiting and len(self.running) < min(self.max_num_seqs, self.max_rows):
            request = self.waiting.popleft()
            if not _may_start(request):
                held_back.append(request)
            elif not self._start(request):
                held_back.append(request)
                self._full = True
                break
        self.waiting.extendleft(reversed(held_back))

    def _start(self, request: Request) -> bool:
        sequence = self._open(request)
        rows = [(sequence, len(request.context.tokens) - len(sequence)), *self._promised()]
        # One page more for each that runs, to go on with.
        if self.running and not self.cache.fits(rows, spare=len(self.running)):
            self.cache.free(sequence)
            return False
        request.sequence = sequence
        if request.cached_tokens is None:
            request.begin(len(sequence))
            self._counters.started(len(request.context.tokens), len(sequence))
        self.running.append(request)
        self.running.sort(key=lambda running: running.order)
        return True

    def _open(self, request: Request) -> KVSequence:
        leader, request.leader = request.leader, None
        if request.whole:
            return self.cache.open([])
        tokens, there = request.context.tokens, None if leader is None else leader.sequence
        # A leader that was sent back and is being recomputed holds only part of the prompt.
        if there is not None and len(there) >= len(tokens) - 1 and not request.generated:
            return self.cache.fork(there, len(tokens) - 1)
        return self.cache.open(tokens)

    def _promised(self) -> list[tuple[KVSequence, int]]:
        """Rows that the running requests need for their prompts."""
        return [(one.sequence, one.pending) for one in self.running if one.sequence is not None]

    def _secure(self, request: Request) -> None:
        """Get one slot for the request, at the cost of younger ones; without any it goes back itself."""
        assert request.sequence is not None
        while not self.cache.reserve(request.sequence, 1):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return

    def _preempt(self, request: Request) -> None:
        self._counters.preemptions += 1
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._full = False
        if request.sequence is not None:
            self.cache.free(request.sequence)
            request.sequence = None

    def _prefills(self, decoding: int) -> list[Work]:
        prompts = [request for request in self.running if not request.decoding]
        if not prompts:
            return []
        for request in prompts:
            if not request.whole:
                self._take_over(request)
        room, left = self.max_rows - decoding, float(self._chunk(decoding))
        shortest = sorted(prompts, key=lambda request: request.pending)
        rows: dict[Request, int] = {}
        for request, share in [(prompts[0], left / OLDEST_SHARE), *((one, left) for one in shortest)]:
            weight = self._weight(request)
            fits = max(int(min(share, left) / weight), 0 if rows else 1)
            more = min(request.pending - rows.get(request, 0), room, fits)
            if more > 0:
                rows[request] = rows.get(request, 0) + more
                room -= more
                left -= more * weight
        works = [self._prefill(request, its) for request, its in rows.items()]
        return [work for work in works if work is not None]

    def _take_over(self, request: Request) -> None:
        """Use what others computed of the same prompt meanwhile."""
        sequence, cached = request.sequence, request.cached_tokens
        assert sequence is not None
        assert cached is not None
        had = len(sequence)
        self.cache.extend(sequence, request.context.tokens)
        if not request.generated:
            gained = min(len(sequence) - had, request.context.prompt_length - 1 - cached)
            request.cached_tokens = cached + gained
            self._counters.cached_tokens += gained

    def _chunk(self, decoding: int) -> int:
        """Prompt rows of the next pass, if they need not look far back."""
        room = self.max_rows - decoding
        alone = not self.expecting and len(self.running) == 1 and not self.waiting
        if self.pass_time is None or alone:
            return room
        patience = PATIENCE * max(self.pass_time.cost(NEWCOMER), self.pass_time.cost(max(decoding, 1)))
        return min(room, max(self.pass_time.rows_within(patience, self.max_rows) - decoding, LEAST_CHUNK))

    def _weight(self, request: Request) -> float:
        if self.pass_time is None or request.sequence is None:
            return 1.0
        return self.pass_time.weight(len(request.sequence))

    def _prefill(self, request: Request, rows: int) -> Work | None:
        sequence = request.sequence
        assert sequence is not None
        slots = self.cache.slack(sequence) + self.cache.available * self.cache.page_size
        chunk = min(request.pending, rows, slots)
        if chunk <= 0:
            return None
        reserved = self.cache.reserve(sequence, chunk)
        assert reserved, "the chunk was cut to the pages there are"
        return Work(request, sequence, chunk, _EMPTY, wanted=chunk == request.pending, decode=False)

    def _decodes(self, requests: list[Request], prompt_rows: int) -> list[Work]:
        """One row and a draft for each; drafts share the rows and pages that nobody needs."""
        if not requests:
            return []
        rows = (self.max_rows - prompt_rows - len(requests)) // len(requests)
        slots = self.cache.available // len(requests) * self.cache.page_size
        rooms = []
        for request in requests:
            assert request.sequence is not None
            rooms.append(max(0, min(request.room, rows, slots + self.cache.slack(request.sequence) - 1)))
        works = []
        for request, draft in self._plan(requests, rooms, len(requests) + prompt_rows):
            assert request.sequence is not None
            reserved = self.cache.reserve(request.sequence, 1 + len(draft))
            assert reserved, "rooms promised pages that are not there"
            works.append(Work(request, request.sequence, 1, draft, wanted=True, decode=True))
        return works

    def _plan(
        self, requests: Sequence[Request], rooms: Sequence[int], base_rows: int
    ) -> list[tuple[Request, Draft]]:
        """Ask each planner once for all its requests, the later ones for what the earlier leave."""
        groups: dict[Planner, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(request.planner, []).append(i)
        drafts: list[Draft | None] = [None] * len(requests)
        for planner, members in groups.items():
            contexts, theirs = [requests[i].context for i in members], [rooms[i] for i in members]
            try:
                planned = planner.plan(contexts, theirs, decoding=len(requests), base_rows=base_rows)
            except Exception as error:
                for i in members:
                    self._fail(requests[i], error)
                continue
            for i, draft in zip(members, planned, strict=True):
                assert len(draft) <= rooms[i], "a draft is larger than its room"
                drafts[i] = draft
                base_rows += len(draft)
        return [(r, draft) for r, draft in zip(requests, drafts, strict=True) if draft is not None]


def _may_start(request: Request) -> bool:
    """A request that shares its leader's prompt waits until that is computed."""
    leader = request.leader
    return leader is None or leader.generated > 0 or leader.over
