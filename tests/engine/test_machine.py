"""The scheduler as a state machine: requests come, write, share, give way, break and leave, in any order.

After each step every page has one owner and nobody is lost; every text that is completed is the one that
the request would have written alone, and every text that was cut short is the front of it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.core import Completion, SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.planning.pass_time import PassTime
from support.constraints import Pattern
from support.drafters import RandomTree, following
from support.engines import RULE, TOKENIZER, finish, same
from support.planners import FixedPlanner
from support.stub_target import StubTarget
from support.tiny_tokenizer import EOS, VOCAB_SIZE

PROMPTS = [
    tuple(b"the cat sat on the mat, the cat"),
    tuple(b"the cat sat on the mat, the dog sat too"),  # shares its front with the first
    tuple(b"ab"),
    tuple(range(40, 90)),
    (7,),
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=1.0, seed=5, max_tokens=25, logprobs=2),
    SamplingParams(temperature=0.7, seed=6, max_tokens=3, frequency_penalty=1.0),
    SamplingParams(temperature=0.0, max_tokens=0),
]
PATTERN = Pattern([range(97, 123), [32], [44, 45]], 14, EOS, VOCAB_SIZE)
CONTEXT = 80


class Kind(NamedTuple):
    """A target's layers: with a window or without, or both."""

    sight: int = 0
    everywhere: bool = False


KINDS = [Kind(), Kind(6), Kind(6, True), Kind(1, True), Kind(17)]


class Ask(NamedTuple):
    kind: Kind
    prompt: int
    params: int
    constrained: bool
    index: int


def add(engine: Engine, ask: Ask, planner: FixedPlanner, leader: Request | None = None) -> Request:
    params = PARAMS[ask.params]
    return engine.add(
        PROMPTS[ask.prompt],
        params,
        planner,
        seed=(params.seed or 0) + ask.index,
        constraint=PATTERN.fresh() if ask.constrained else None,
        leader=leader,
        index=ask.index,
    )


@functools.cache
def alone(ask: Ask) -> Completion:
    engine = Engine(StubTarget(RULE, **ask.kind._asdict()), TOKENIZER, context_limit=CONTEXT)
    return finish(engine, add(engine, ask, FixedPlanner()))[0]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.sampled_from([(20, 4), (25, 4), (10, 8), (64, 8)]),
        max_rows=st.sampled_from([3, 6, 20, 64]),
        max_num_seqs=st.integers(1, 6),
        bounded=st.booleans(),
        kind=st.sampled_from(KINDS),
        scarce=st.booleans(),
    )
    def start(
        self,
        pages: tuple[int, int],
        max_rows: int,
        max_num_seqs: int,
        bounded: bool,
        kind: Kind,
        scarce: bool,
    ) -> None:
        self.kind = kind
        # The fewest window pages that one text gets on with.
        least = -(-kind.sight // pages[1]) + 2
        self.target = StubTarget(
            RULE,
            pages=pages[0],
            page_size=pages[1],
            window_pages=least if scarce else None,
            **kind._asdict(),
        )
        self.engine = Engine(
            self.target,
            TOKENIZER,
            context_limit=CONTEXT,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_rows,
            pass_time=PassTime({1: 1.0, 8: 1.1, 16: 2.0}) if bounded else None,
        )
        self.live: dict[Request, Ask] = {}
        self.aborted: set[Request] = set()
        self.broken = 0

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        params=st.integers(0, len(PARAMS) - 1),
        constrained=st.booleans(),
        n=st.sampled_from([1, 1, 1, 3]),
        length=st.sampled_from([0, 2, 7]),
    )
    def admit(self, prompt: int, params: int, constrained: bool, n: int, length: int) -> None:
        leader: Request | None = None
        for index in range(n):
            ask = Ask(self.kind, prompt, params, constrained, index)
            truth = following([*PROMPTS[prompt], *alone(ask).tokens])
            drafter = RandomTree(VOCAB_SIZE, index, next_token=truth, truth=0.7) if length else None
            request = add(self.engine, ask, FixedPlanner(drafter, length), leader)
            leader = leader or request
            self.live[request] = ask

    @rule(count=st.integers(1, 5))
    def extend(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.nobody_is_lost_and_nothing_leaks()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.live)))
        if not request.over:
            self.aborted.add(request)
        self.engine.abort(request)
        assert request.over
        assert request.sequence is None

    @precondition(lambda self: self.engine.running > 1)
    @rule()
    def preempt(self) -> None:
        self.engine.scheduler._preempt(self.engine.scheduler.running[-1])

    @rule()
    def break_a_pass(self) -> None:
        self.target.fail = ValueError("broken on purpose")
        self.engine.step()
        self.broken += self.target.fail is None
        self.target.fail = None

    @rule()
    def interrupt(self) -> None:
        self.engine.torn = True

    @rule()
    def forget_prefixes(self) -> None:
        self.engine.clear_cache()

    @invariant()
    def nobody_is_lost_and_nothing_leaks(self) -> None:
        if self.engine.torn:
            return
        scheduler = self.engine.scheduler
        scheduler.cache.check_integrity()
        queued = [*scheduler.running, *scheduler.waiting]
        assert len(set(queued)) == len(queued)
        assert set(queued) == {request for request in self.live if not request.over}
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert all(request.sequence is not None for request in scheduler.running)
        assert all(request.sequence is None for request in scheduler.waiting)
        orders = [request.order for request in scheduler.running]
        assert orders == sorted(orders)
        if not scheduler.running:
            assert scheduler.cache.used == 0.0
        for request in [request for request in self.live if request.over]:
            self.check(request, self.live.pop(request))

    def check(self, request: Request, ask: Ask) -> None:
        if request.error is not None:
            assert str(request.error) == "broken on purpose"
            assert self.broken
            return
        done, plain = request.completion, alone(ask)
        assert done is not None
        if request in self.aborted:
            assert done.finish_reason == "abort"
            assert done.tokens == plain.tokens[: len(done.tokens)]
        else:
            same(plain, done)
        assert "".join(chunk.text for chunk in request.chunks) == done.text

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        steps = 0
        while not self.engine.idle:
            self.engine.step()
            steps += 1
            assert steps < 5_000, "somebody is stuck"
        self.nobody_is_lost_and_nothing_leaks()
        assert not self.live
        assert self.engine.cache.used == 0.0


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
