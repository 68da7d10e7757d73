"""Put servers under load: so many clients that never pause, or requests that arrive by themselves.

Servers take turns at every level and each is asked the same prompts there, one server at a time. Levels are
dealt different prompts, since a server that saw a prompt before may have its cache, or its answer, at hand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.tools.load_figures import LoadFigures, Reply, differing, figures
from paceline.tools.peer_client import Answer, PeerError, Server
from paceline.tools.prompts import Prompt

SCHEMA = 1
WARM_UP_TOKENS = 8

Ask = Callable[[Prompt], Answer]
"""Sends one prompt and waits for the whole answer; raises PeerError."""


class Level(Protocol):
    """How requests come."""

    @property
    def label(self) -> str: ...

    @property
    def wanted(self) -> int:
        """The fewest requests that make sense."""
        ...

    def run(self, ask: Ask, prompts: Sequence[Prompt], done: Callable[[], None]) -> list[Reply]:
        """Ask every prompt once; `done` is called, by any thread, after each. Replies in order of prompts."""
        ...


@dataclass(frozen=True, slots=True)
class Clients:
    """A closed loop: each client sends its next request when its last was answered."""

    count: int

    @property
    def label(self) -> str:
        return f"{self.count} client{'s' if self.count > 1 else ''}"

    @property
    def wanted(self) -> int:
        return self.count

    def run(self, ask: Ask, prompts: Sequence[Prompt], done: Callable[[], None]) -> list[Reply]:
        replies: list[Reply | None] = [None] * len(prompts)
        waiting = iter(enumerate(prompts))
        lock = threading.Lock()
        start = time.perf_counter()

        def client() -> None:
            while True:
                with lock:
                    place, prompt = next(waiting, (-1, None))
                if prompt is None:
                    return
                replies[place] = _reply(ask, prompt, start, time.perf_counter() - start)
                done()

        _together([client] * min(self.count, len(prompts)))
        return _all(replies)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An open loop: requests arrive at a rate, whether earlier ones were answered or not.

    Args:
        rate: requests per second.
        burstiness: shape of the gamma-distributed gaps; 1 is a Poisson process, less is burstier, more is
            more even, infinity is a metronome (as in vLLM's `bench serve`).
    """

    rate: float
    burstiness: float = 1.0
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{self.rate:g}/s"

    @property
    def wanted(self) -> int:
        return 1

    def times(self, count: int) -> list[float]:
        """Seconds from the start at which `count` requests arrive, the first at 0.

        Gaps are scaled so that the last comes when it would at an even pace: the rate is the asked one also
        for few requests. (Given its number of arrivals, a Poisson process has no other shape.)
        """
        if count < 2:
            return [0.0] * count
        gaps = np.ones(count - 1)
        if np.isfinite(self.burstiness):
            gaps = np.random.default_rng(self.seed).gamma(self.burstiness, size=count - 1) + 1e-12
        at = np.concatenate([[0.0], np.cumsum(gaps)])
        return (at * ((count - 1) / self.rate / at[-1])).tolist()  # type: ignore[no-any-return]

    def run(self, ask: Ask, prompts: Sequence[Prompt], done: Callable[[], None]) -> list[Reply]:
        replies: list[Reply | None] = [None] * len(prompts)
        start = time.perf_counter()

        def request(place: int, due: float) -> None:
            replies[place] = _reply(ask, prompts[place], start, due)
            done()

        threads = []
        for place, due in enumerate(self.times(len(prompts))):
            time.sleep(max(0.0, start + due - time.perf_counter()))
            threads.append(threading.Thread(target=request, args=(place, due), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return _all(replies)


@dataclass(slots=True)
class Cell:
    """One server at one level. `ratio` is its output tokens/s over the first server's at this level."""

    level: str
    server: str
    figures: LoadFigures
    ratio: float | None
    replies: list[Reply]


@dataclass(slots=True)
class LoadReport:
    """What a sweep found.

    Attributes:
        asked: prompts in all, `distinct` of them different.
        differing: per server, prompts that it answered in more than one way.
    """

    servers: list[str]
    levels: list[str]
    asked: int
    distinct: int
    cells: list[Cell] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"paceline_load": SCHEMA} | asdict(self)


def sweep(
    servers: Sequence[Server],
    levels: Sequence[Level],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    chat: bool,
    timeout: float,
    progress: Callable[[], None] = lambda: None,
) -> LoadReport:
    """Run every level on every server. A few tokens by each server, not counted, come first.

    Args:
        prompts: dealt among the levels; the same prompt may come again.
        timeout: seconds after which a request is given up.

    Raises:
        UsageError: too few prompts, or servers of one name.
    """
    names = [server.name for server in servers]
    if len(set(names)) < len(names):
        raise UsageError(f"servers {', '.join(names)} are not all different", "name each: NAME=URL")
    dealt = deal(prompts, levels)
    for server in servers:
        brief = replace(params, max_tokens=WARM_UP_TOKENS, min_tokens=0)
        with suppress(PeerError):  # it will fail again, and be counted, in its turn
            asking(server, brief, chat=chat, timeout=timeout)(prompts[0])
    report = LoadReport(
        names, [level.label for level in levels], len(prompts), len({p.name for p in prompts})
    )
    for turn, (level, some) in enumerate(zip(levels, dealt, strict=True)):
        found: dict[str, list[Reply]] = {}
        for i in range(len(servers)):
            server = servers[(turn + i) % len(servers)]
            ask = asking(server, params, chat=chat, timeout=timeout)
            found[server.name] = level.run(ask, some, progress)
        report.cells += _cells(level.label, {name: found[name] for name in names})
    for name in names:
        report.differing[name] = differing([r for c in report.cells if c.server == name for r in c.replies])
    return report


def asking(server: Server, params: SamplingParams, *, chat: bool | None, timeout: float) -> Ask:
    """How a prompt is sent to a server; `chat` None means as the prompt has messages or not."""
    body = server.body(params)

    def ask(prompt: Prompt) -> Answer:
        path, asked = prompt.for_server(chat=prompt.messages is not None if chat is None else chat)
        return server.ask(path, body | asked, timeout=timeout)

    return ask


def deal(prompts: Sequence[Prompt], levels: Sequence[Level]) -> list[Sequence[Prompt]]:
    """Part prompts among levels in equal stretches, each in order; the first get those left over.

    Raises:
        UsageError: a level would get too few.
    """
    size, more = divmod(len(prompts), len(levels))
    starts = [i * size + min(i, more) for i in range(len(levels) + 1)]
    for level in levels:
        if size < max(level.wanted, 1):
            raise UsageError(
                f"{len(prompts)} prompts are {size} for each level, too few for {level.label}",
                "give more prompts; or --repeat, if caches and drafters that remember answers may help",
            )
    return [prompts[start:end] for start, end in pairwise(starts)]


def _cells(level: str, found: dict[str, list[Reply]]) -> Iterator[Cell]:
    reference: float | None = None
    for name, replies in found.items():
        sums = figures(replies)
        speed = sums.output_tokens_per_s
        reference = speed if reference is None else reference
        yield Cell(level, name, sums, speed / reference if reference else None, replies)


def _reply(ask: Ask, prompt: Prompt, start: float, due: float) -> Reply:
    try:
        answer = ask(prompt)
        count = answer.completion_tokens
    except PeerError as error:
        end = time.perf_counter() - start
        return Reply(
            prompt=prompt.name,
            category=prompt.category,
            due_s=due,
            end_s=end,
            error=error.kind,
            message=error.message,
        )
    return Reply(
        prompt=prompt.name,
        category=prompt.category,
        due_s=due,
        end_s=answer.ended - start,
        pieces_s=tuple(at - start for at in answer.pieces),
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=count,
        text=answer.text,
        finish_reason=answer.finish_reason,
        speculation=answer.speculation,
    )


def _together(bodies: Sequence[Callable[[], None]]) -> None:
    """Run in threads until all are done. They are daemons, so that Ctrl-C need not wait for answers."""
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _all(replies: Sequence[Reply | None]) -> list[Reply]:
    found = [reply for reply in replies if reply is not None]
    assert len(found) == len(replies), "a request was lost"
    return found
