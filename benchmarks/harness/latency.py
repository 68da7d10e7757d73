"""Two things that one client feels: a first token while another's prompt is read, and what HTTP costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from harness.servers import ServerProcess
from harness.tasks import Task
from paceline import LLM, SamplingParams
from paceline.tools.load import asking
from paceline.tools.peer_client import Answer

TIMEOUT_S = 600.0
_EARLIEST, _LATEST = 0.1, 0.6
"""When a short prompt arrives, as shares of the long one's time alone."""


@dataclass(slots=True)
class FirstToken:
    """Seconds to the first token of a short prompt, by turns on an idle server and beside a long prompt.

    Attributes:
        alone_s: the long prompt's own time to its first token.
        overlapped: how many of `beside_s` came while the long prompt was not done.
        cached: prompt tokens that were not computed because something had left them; should be 0.
    """

    engine: str
    alone_s: float
    idle_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    overlapped: int = 0
    cached: int = 0

    @property
    def ratio(self) -> float:
        return median(self.beside_s) / median(self.idle_s)


def first_token(
    server: ServerProcess, text: Sequence[int], *, short: int, long: int, times: int
) -> FirstToken:
    """Measure `times` pairs. Prompts are stretches of `text`, each with a beginning of its own."""
    places = iter(range(1, 1 << 30))

    def prompt(length: int) -> list[int]:
        start = next(places) * 7919 % len(text)
        return [*text[start:], *text, *text[:start]][:length]

    _complete(server, prompt(short))
    found = FirstToken(server.name, _seconds(_complete(server, prompt(long))))
    for i in range(times):
        idle = _complete(server, prompt(short))
        share = _EARLIEST + (_LATEST - _EARLIEST) * (i / max(times - 1, 1))
        beside, longer = _side_by_side(server, prompt(short), prompt(long), share * found.alone_s)
        found.idle_s.append(_seconds(idle))
        found.beside_s.append(_seconds(beside))
        found.long_s.append(_seconds(longer))
        found.overlapped += _first(beside) < _first(longer)
        found.cached += sum(answer.cached_tokens for answer in (idle, beside, longer))
    return found


def _side_by_side(
    server: ServerProcess, short: list[int], long: list[int], delay: float
) -> tuple[Answer, Answer]:
    """The short one is sent `delay` seconds after the long one."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(_complete(server, long)))
    thread.start()
    time.sleep(delay)
    answer = _complete(server, short)
    thread.join()
    return answer, answers[0]


def _complete(server: ServerProcess, ids: list[int]) -> Answer:
    body = server.client.body(SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    return server.client.ask("/completions", body | {"prompt": ids}, timeout=TIMEOUT_S)


def _first(answer: Answer) -> float:
    return answer.pieces[0] if answer.pieces else answer.ended


def _seconds(answer: Answer) -> float:
    return _first(answer) - answer.started


@dataclass(slots=True)
class Overhead:
    """The same answers by a server and by the engine in this process, by turns; seconds of each answer.

    Attributes:
        tokens: written by each.
        server_s, engine_s: from the first piece of text to the last.
        request_s, call_s: whole requests: from messages over HTTP, and from token ids.
        differences: prompts whose texts were not equal; should be none.
    """

    speculate: str
    tokens: int = 0
    server_s: list[float] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def decode(self) -> float:
        """Share of decode time that the server adds to decoding, of the totals."""
        return sum(self.server_s) / sum(self.engine_s) - 1.0

    @property
    def typical(self) -> float:
        """The same, the median of the answers' own: a pause of the machine does not move it."""
        return median(s / e for s, e in zip(self.server_s, self.engine_s, strict=True) if e > 0) - 1.0

    @property
    def whole(self) -> float:
        """Share of decode time that the server adds to whole requests, of the totals."""
        return (sum(self.request_s) - sum(self.call_s)) / sum(self.engine_s)


def overhead(server: ServerProcess, llm: LLM, todo: Sequence[Task], max_tokens: int) -> Overhead:
    """Ask both every prompt, the first only to warm up. Neither forgets, so both have the same in cache."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    ask = asking(server.client, params, chat=None, timeout=TIMEOUT_S)
    found = Overhead(server.name.split()[-1])
    for turn, task in enumerate(todo):
        kept = found if turn else Overhead("")
        if turn % 2:
            text = _by_engine(kept, llm, task.ids, params)
            answer = _by_server(kept, ask, task)
        else:
            answer = _by_server(kept, ask, task)
            text = _by_engine(kept, llm, task.ids, params)
        kept.tokens += answer.completion_tokens
        if answer.text != text:
            found.differences.append(task.prompt.name)
    return found


def _by_server(found: Overhead, ask: Any, task: Task) -> Answer:
    answer: Answer = ask(task.prompt)
    found.request_s.append(answer.ended - answer.started)
    found.server_s.append(answer.pieces[-1] - answer.pieces[0] if answer.pieces else 0.0)
    return answer


def _by_engine(found: Overhead, llm: LLM, ids: Sequence[int], params: SamplingParams) -> str:
    started = time.perf_counter()
    pieces = []
    text = ""
    for chunk in llm.stream(ids, params):
        if chunk.text:
            pieces.append(time.perf_counter())
            text += chunk.text
    found.call_s.append(time.perf_counter() - started)
    found.engine_s.append(pieces[-1] - pieces[0] if pieces else 0.0)
    return text
