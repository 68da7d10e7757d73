"""Mixed requests, many at a time and a share of them cancelled, against the same requests one by one."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from paceline.tools.peer_client import Answer, PeerError, Server
from paceline.tools.prompts import Prompt

TIMEOUT_S = 120.0
"""A request that takes longer is stuck."""

_REMEMBERED = 200
_SHORT, _LONG = 80, 600
"""Characters of prompts: most are short, so that thousands take minutes."""

Told = tuple[tuple[tuple[int, str], ...], tuple[tuple[int, str], ...], int]
"""Texts and finish reasons by choice, and completion tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """One of the requests that are asked again and again: everything but whether it is streamed."""

    key: int
    path: str
    body: dict[str, Any]


def make_cases(prompts: Sequence[Prompt], count: int, max_tokens: int, seed: int) -> list[Case]:
    """Requests of every kind, the same for the same seed."""
    return [_case(key, random.Random(f"{seed} case {key}"), prompts, max_tokens) for key in range(count)]


def _case(key: int, luck: random.Random, prompts: Sequence[Prompt], max_tokens: int) -> Case:
    text = luck.choice(prompts).text[: _LONG if luck.random() < 0.1 else luck.randint(5, _SHORT)]
    body: dict[str, Any] = {"max_tokens": luck.randint(1, max_tokens), "seed": luck.randrange(2**32)}
    body["temperature"] = luck.choice([0.0, 0.0, 0.7, 1.3])
    for chance, more in (
        (0.2, {"top_p": 0.9}),
        (0.2, {"top_k": 20}),
        (0.1, {"min_p": 0.05}),
        (0.1, {"repetition_penalty": 1.2}),
        (0.1, {"presence_penalty": 0.5, "frequency_penalty": 0.3}),
        (0.1, {"logit_bias": {"5": -2.0}}),
        (0.2, {"stop": [".", "\n\n"]}),
        (0.1, {"ignore_eos": True}),
        (0.1, {"n": 2}),
        (0.1, {"speculation": {"off": True}}),
    ):
        if luck.random() < chance:
            body |= more
    if luck.random() < 0.5:
        return Case(key, "/completions", body | {"prompt": text} | luck.choice([{}, {"logprobs": 2}]))
    body["messages"] = [{"role": "user", "content": text}]
    special = luck.random()
    if special < 0.1:
        body |= {"logprobs": True, "top_logprobs": 2}
    elif special < 0.2:
        body |= {"prediction": {"type": "content", "content": text}}
    elif special < 0.3 and "ignore_eos" not in body:  # a text that is complete must be allowed to end
        body |= {"response_format": {"type": "json_object"}}
    return Case(key, "/chat/completions", body)


def told(answer: Answer) -> Told:
    texts, reasons = sorted(answer.texts.items()), sorted(answer.finish_reasons.items())
    return tuple(texts), tuple(reasons), answer.completion_tokens


def ask(server: Server, case: Case, *, streamed: bool, timeout: float) -> Answer:
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    return server.ask(case.path, {"model": server.model} | case.body | more, timeout=timeout)


def serially(server: Server, cases: Iterable[Case]) -> dict[int, Told]:
    """What every case is answered when nothing else runs. Raises PeerError."""
    return {case.key: told(ask(server, case, streamed=False, timeout=TIMEOUT_S)) for case in cases}


@dataclass(slots=True)
class Storm:
    """What became of the requests.

    Attributes:
        equal: completed with the same texts as alone.
        cancelled: closed by the client at a random moment; `finished_first` were to be, but were faster.
        different: completed with other texts than alone: key, streamed, got, expected.
        failed: neither completed nor cancelled, by kind; "timed out" means stuck.
        latencies_s: of completed requests.
    """

    equal: int = 0
    cancelled: int = 0
    finished_first: int = 0
    different: list[tuple[int, bool, Told, Told]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.equal + self.cancelled + len(self.different) + sum(self.failed.values())


class Weather:
    """Sends a storm of requests from many threads; `storm` may be read while it rages."""

    def __init__(
        self, server: Server, cases: Sequence[Case], alone: dict[int, Told], *, cancel: float, seed: int
    ) -> None:
        self.storm = Storm()
        self._server = server
        self._cases = cases
        self._alone = alone
        self._cancel = cancel
        self._seed = seed
        self._lock = threading.Lock()

    def rage(self, requests: int, clients: int) -> None:
        """Send so many requests and wait for the last."""
        numbers = iter(range(requests))

        def client() -> None:
            while True:
                with self._lock:
                    number = next(numbers, None)
                if number is None:
                    return
                self._one(random.Random(f"{self._seed} request {number}"))

        threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _one(self, luck: random.Random) -> None:
        case, streamed = luck.choice(self._cases), luck.random() < 0.5
        cancel = luck.random() < self._aim()
        timeout = luck.random() * self._usual() if cancel else TIMEOUT_S
        try:
            answer = ask(self._server, case, streamed=streamed, timeout=timeout)
            found = told(answer)
        except PeerError as error:
            with self._lock:
                if cancel and error.kind == "timed out":
                    self.storm.cancelled += 1
                else:
                    self.storm.failed[error.kind] += 1
                    self.storm.messages.setdefault(error.kind, f"case {case.key}: {error.message}")
            return
        with self._lock:
            self.storm.finished_first += cancel
            self.storm.latencies_s.append(answer.ended - answer.started)
            if found == self._alone[case.key]:
                self.storm.equal += 1
            else:
                self.storm.different.append((case.key, streamed, found, self._alone[case.key]))

    def _aim(self) -> float:
        """The share of requests to cancel so that the wanted share is: some finish before their moment."""
        with self._lock:
            hit, missed = self.storm.cancelled, self.storm.finished_first
        return self._cancel * (hit + missed + 1) / (hit + 1)

    def _usual(self) -> float:
        """Seconds that a request has lately taken, so that cancelling hits every stage of its life."""
        with self._lock:
            recent = self.storm.latencies_s[-_REMEMBERED:]
        return median(recent) if recent else 0.1


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory of the server at a moment of the storm."""

    seconds: float
    done: int
    resident: int


def growth(moments: Sequence[Moment], requests: int) -> float:
    """Bytes that memory grew from the second to the last fifth of the requests; in the first, caches fill."""
    fifth = requests / 5
    early = [m.resident for m in moments if fifth <= m.done < 2 * fifth]
    late = [m.resident for m in moments if m.done >= 4 * fifth]
    return fmean(late) - fmean(early) if early and late else 0.0


class Watch:
    """Notes a server's memory, in a thread, until it is closed."""

    def __init__(self, resident: Any, storm: Storm, every: float = 0.5) -> None:
        self.moments: list[Moment] = []
        self._resident = resident
        self._storm = storm
        self._every = every
        self._over = threading.Event()
        self._started = time.perf_counter()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            now = time.perf_counter() - self._started
            self.moments.append(Moment(now, self._storm.done, self._resident()))
            if self._over.wait(self._every):
                return


def still_busy(server: Server, within: float) -> int:
    """Requests that a server still counts as running or waiting, after at most `within` seconds."""
    end = time.monotonic() + within
    while True:
        busy = _busy(server.get("/metrics").decode())
        if busy == 0 or time.monotonic() > end:
            return busy
        time.sleep(0.05)


def _busy(metrics: str) -> int:
    names = ("num_requests_running", "num_requests_waiting")
    lines = (line for line in metrics.splitlines() if not line.startswith("#"))
    found = [float(line.split()[-1]) for line in lines if line.split("{")[0].rsplit(":", 1)[-1] in names]
    assert len(found) == len(names), "the server's metrics do not tell what runs"
    return int(sum(found))
