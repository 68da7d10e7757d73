"""The race: fair turns by each lane's own clock, and the whole text of both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.core import SamplingParams
from paceline.engine import Chunk
from paceline.tools import demo
from support.stub_llm import stub_llm


class Clock:
    """Stands in for `time`: it moves only when somebody computes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def runner(clock: Clock, name: str, steps: int, seconds: float, log: list[str]) -> Iterator[Chunk]:
    for _ in range(steps):
        clock.now += seconds
        log.append(name)
        yield Chunk(text=name, tokens=[1], sources=[""], logprobs=None)


def test_the_lane_that_is_behind_goes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = Clock(), list[str]()
    monkeypatch.setattr(demo, "time", clock)
    lanes = demo.race({"slow": runner(clock, "s", 3, 3.0, log), "fast": runner(clock, "f", 6, 1.0, log)})
    *_, (slow, fast) = lanes
    assert "".join(log) == "sfffsfffs"
    assert (slow.clock, fast.clock) == (9.0, 6.0)
    assert (slow.tokens_per_s, fast.tokens_per_s) == (pytest.approx(2 / 6), pytest.approx(1.0))


def test_both_lanes_finish_with_the_same_text() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40)
    streams = {name: stub_llm().stream("abcabc", params, speculate=name) for name in ("off", "ngram")}
    *_, (plain, fast) = demo.race(streams)
    assert plain.result is not None
    assert fast.result is not None
    assert plain.result.tokens == fast.result.tokens
    assert "".join(text for text, _ in plain.pieces) == plain.result.text
    assert "".join(text for text, _ in fast.pieces) == fast.result.text
    assert (plain.tokens, fast.tokens) == (40, 40)
    assert any(drafted for _, drafted in fast.pieces)
    assert not any(drafted for _, drafted in plain.pieces)
