"""Who gets how many rows: short prompts do not wait for long ones, long ones do not wait for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core import Context, Draft, SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.scheduler import OLDEST_SHARE
from paceline.planning.pass_time import PassTime
from support.constraints import Pattern
from support.drafters import Oracle, following
from support.engines import GREEDY, RULE, TOKENIZER, engine_for, finish, run, same, submit
from support.planners import FixedPlanner
from support.stub_target import StubTarget
from support.tiny_tokenizer import EOS, VOCAB_SIZE

ONE = SamplingParams(temperature=0.0, max_tokens=1)


class Frozen(PassTime):
    """Learns nothing from how fast the stub is. A pass of one row takes 10 ms, of 16 rows 27 ms."""

    def __init__(self) -> None:
        super().__init__({1: 10.0, 8: 16.0, 16: 27.0})

    def observe(self, rows: int, seconds: float) -> None: ...

    def observe_prompts(self, rows: int, looks: int, seconds: float) -> None: ...


CHUNK = 29
"""A newcomer of 20 rows takes 32.5 ms. A pass of 29 takes 1.4 times that."""


def bounded(**options: Any) -> Engine:
    limits = {
        name: options.pop(name) for name in ("max_num_seqs", "max_num_batched_tokens") if name in options
    }
    engine = Engine(StubTarget(RULE, **options), TOKENIZER, pass_time=Frozen(), **limits)
    engine.scheduler.expecting = True
    return engine


def row_counts(engine: Engine) -> list[int]:
    assert isinstance(engine.target, StubTarget)
    return engine.target.row_counts


def text(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt) % 256 for i in range(length)]


def test_a_newcomer_overtakes_a_long_prompt_at_once() -> None:
    engine = bounded()
    long = submit(engine, text(300))
    engine.step()
    engine.step()
    assert row_counts(engine) == [CHUNK, CHUNK]
    newcomer = submit(engine, text(20, 1))
    engine.step()
    assert newcomer.generated == 1
    assert row_counts(engine)[-1] == CHUNK  # the long one got the rest
    assert long.pending == 300 - 2 * CHUNK - (CHUNK - 20)
    for request, prompt in ((long, text(300)), (newcomer, text(20, 1))):
        same(run(engine_for(), prompt), finish(engine, request)[0])


@pytest.mark.parametrize(("decoding", "chunk"), [(4, 25), (8, 21), (16, 13), (40, 17)])
def test_a_chunk_takes_what_texts_that_are_written_leave(decoding: int, chunk: int) -> None:
    engine = bounded()
    for i in range(decoding):
        submit(engine, [i], SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    while any(not request.generated for request in engine.scheduler.running) or not engine.running:
        engine.step()
    submit(engine, text(300))
    engine.step()
    assert row_counts(engine)[-1] == decoding + chunk


def test_the_oldest_prompt_gets_on_whoever_comes() -> None:
    """A prompt that would fill a chunk arrives before every pass."""
    engine = bounded(context_limit=512, pages=256)
    long = submit(engine, text(200), ONE)
    passes = 0
    while not long.over:
        submit(engine, text(CHUNK, passes + 1), ONE)
        engine.step()
        passes += 1
    assert passes <= 200 / (CHUNK // OLDEST_SHARE)
    assert passes > 200 / CHUNK


def test_rows_that_look_far_back_make_a_chunk_shorter_and_nobody_elses() -> None:
    engine = bounded()
    long = submit(engine, text(400))
    engine.step()
    assert engine.pass_time is not None
    engine.pass_time.weight = lambda position: 1.0 + position / CHUNK  # type: ignore[method-assign]
    engine.step()
    assert row_counts(engine) == [CHUNK, CHUNK // 2]
    newcomer = submit(engine, text(20, 1))
    engine.step()
    assert newcomer.generated == 1
    assert long.pending < 400 - CHUNK - CHUNK // 2


def test_a_lone_prompt_is_read_at_once_where_nobody_is_expected() -> None:
    engine = bounded()
    engine.scheduler.expecting = False
    submit(engine, text(300))
    engine.step()
    assert row_counts(engine) == [64]
    submit(engine, text(300, 1))
    engine.step()
    assert row_counts(engine) == [64, CHUNK]


def test_prompts_alike_are_computed_once_though_they_arrive_together() -> None:
    engine = bounded(page_size=8)
    requests = [submit(engine, text(200), ONE) for _ in range(4)]
    done = finish(engine, *requests)
    assert sum(row_counts(engine)) <= 200 + 4 * 8
    assert [one.cached_tokens for one in done] == [0, 192 - 3, 192, 192]  # three were its own already
    assert engine.counters.cached_tokens == 3 * 192 - 3
    for one in done:
        same(done[0], one)


def test_a_prompt_that_others_need_room_for_waits_outside() -> None:
    """Two prompts of five pages on eight: the second would be sent back again and again."""
    engine = bounded(pages=8, page_size=8, context_limit=64, max_rows=8)
    first, second = submit(engine, text(40), ONE), submit(engine, text(40, 3), ONE)
    engine.step()
    assert (first.sequence is not None, second.sequence is None) == (True, True)
    finish(engine, first, second)
    assert engine.counters.preemptions == 0


def test_limits_of_rows_and_requests_are_kept() -> None:
    engine = bounded(max_num_seqs=3, max_num_batched_tokens=9)
    planner = FixedPlanner(Oracle(following(*[[i, *run(engine_for(), [i]).tokens] for i in range(8)])), 8)
    requests = [submit(engine, [i], planner=planner) for i in range(8)]
    running = []
    while not all(request.over for request in requests):
        engine.step()
        running.append(engine.running)
    assert max(running) == 3
    assert max(row_counts(engine)) == 9
    for i, request in enumerate(requests):
        same(run(engine_for(), [i]), finish(engine, request)[0])


def test_requests_start_in_order_of_arrival() -> None:
    engine = engine_for()
    engine.scheduler.max_num_seqs = 2
    requests = [submit(engine, text(30 - i, i), ONE) for i in range(6)]
    over: list[int] = []
    while len(over) < 6:
        engine.step()
        over += [i for i, request in enumerate(requests) if request.over and i not in over]
    assert over == [0, 1, 2, 3, 4, 5]


def test_answers_that_waited_for_their_prompt_keep_their_place() -> None:
    """What runs is ordered by arrival, so that the youngest is sent back when pages run out."""
    engine = engine_for()
    leader = submit(engine, [1])
    follower = engine.add([1], GREEDY, FixedPlanner(), seed=0, leader=leader, index=1)
    other = submit(engine, [2])
    engine.step()
    engine.step()
    assert engine.scheduler.running == [leader, follower, other]


# --- the same text ---------------------------------------------------------------------------------------

PATTERN = Pattern([range(97, 123), range(97, 123), [32], [44, 45]], 24, EOS, VOCAB_SIZE)
SAMPLED = SamplingParams(temperature=1.0, seed=4, max_tokens=30, logprobs=3, frequency_penalty=0.5)


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_alone_together_chunked_warm_and_sent_back_write_the_same(
    params: SamplingParams, constrained: bool
) -> None:
    prompts = [text(length, length) for length in (3, 40, 70)]

    def ask(engine: Engine) -> list[Any]:
        return [
            engine.add(p, params, FixedPlanner(), seed=4, constraint=PATTERN.fresh() if constrained else None)
            for p in prompts
        ]

    alone = []
    for i in range(3):
        engine = engine_for()
        alone += finish(engine, ask(engine)[i])
    crowded = engine_for(pages=19, page_size=8, context_limit=120)
    for engine in (engine_for(), bounded(), bounded(max_num_batched_tokens=4), crowded):
        for _ in range(2):  # cold, then warm
            for plain, other in zip(alone, finish(engine, *ask(engine)), strict=True):
                same(plain, other)
    assert crowded.counters.preemptions > 0


# --- planners ----------------------------------------------------------------------------------------------


class Told(FixedPlanner):
    """Remembers what it is told of the pass."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.told: list[tuple[int, int, int]] = []

    def plan(
        self, contexts: Sequence[Context], rooms: Sequence[int], *, decoding: int = 1, base_rows: int = 1
    ) -> list[Draft]:
        self.told.append((len(contexts), decoding, base_rows))
        return super().plan(contexts, rooms, decoding=decoding, base_rows=base_rows)


def test_planners_are_told_what_else_is_in_the_pass() -> None:
    engine = bounded()
    truth = following(*[[i, *run(engine_for(), [i]).tokens] for i in range(3)])
    eager, quiet = Told(Oracle(truth), 5), Told()
    for i, planner in enumerate((eager, eager, quiet)):
        submit(engine, [i], planner=planner)
    engine.step()
    submit(engine, text(100), planner=quiet)
    engine.step()
    assert eager.told == [(2, 3, 3 + 26)]  # three texts, and a chunk of the prompt
    assert quiet.told == [(1, 3, 3 + 26 + 10)]  # and what was bought before


def test_a_request_may_cap_its_drafts() -> None:
    truth = following([1, *run(engine_for(), [1]).tokens])
    for cap in (0, 1, 3):
        planner = FixedPlanner(Oracle(truth), 8)
        engine = engine_for()
        request = engine.add([1], GREEDY, planner, seed=0, max_draft=cap)
        done = finish(engine, request)[0]
        same(run(engine_for(), [1]), done)
        assert max(planner.rooms) == cap
        assert (done.speculation.drafted > 0) == (cap > 0)


def test_decode_time_includes_handing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still but for what sending takes; it is found in the timings, to the last chunk."""
    now = [0.0]
    monkeypatch.setattr("paceline.engine.engine.time.perf_counter", lambda: now[0])
    engine = engine_for()
    request = submit(engine, [1], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    send = request.send

    def slow() -> None:
        now[0] += 1.0
        send()

    monkeypatch.setattr(request, "send", slow)
    done = finish(engine, request)[0]
    assert (done.timings.prefill_s, done.timings.decode_s) == (1.0, 4.0)
