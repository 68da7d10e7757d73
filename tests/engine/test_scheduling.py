"""Many requests on one engine: pages run out, callers leave, things break, and nobody else notices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from paceline.core import Completion, Context, SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.errors import RequestError
from support.drafters import Oracle, RandomTree, following
from support.engines import GREEDY, RULE, TOKENIZER, engine_for, finish, run, same, submit
from support.planners import FixedPlanner
from support.stub_target import StubTarget
from support.tiny_tokenizer import VOCAB_SIZE

PROMPTS = [list(b"the cat sat on the mat "), list(b"a dog ran "), list(b"abcabcabcabcabcabcabcabcabc"), [7]]
SAMPLED = SamplingParams(temperature=1.0, seed=9, max_tokens=30, frequency_penalty=1.5, logprobs=1)


def plain(prompt: list[int], params: SamplingParams = GREEDY) -> Completion:
    return run(engine_for(), prompt, params)


def tree_planner(prompt: list[int], done: Completion, length: int = 8) -> FixedPlanner:
    truth = following([*prompt, *done.tokens])
    return FixedPlanner(RandomTree(VOCAB_SIZE, next_token=truth, truth=0.8), length)


def test_prompts_are_prefilled_in_chunks_beside_running_decodes() -> None:
    engine = engine_for(max_rows=8)
    first = submit(engine, PROMPTS[3])
    engine.step()
    assert first.generated == 1
    second = submit(engine, PROMPTS[0])
    steps = 0
    while not second.generated:
        engine.step()
        steps += 1
    assert steps == -(-len(PROMPTS[0]) // 7)  # one row of eight is the first request's
    assert first.generated == 1 + steps
    same(plain(PROMPTS[3]), finish(engine, first)[0])
    same(plain(PROMPTS[0]), finish(engine, second)[0])


def test_preempted_requests_are_recomputed_and_write_the_same() -> None:
    """Four texts of up to 57 tokens on pages for 64: the younger ones must give way again and again."""
    engine = engine_for(pages=8, page_size=8, context_limit=64)
    preempted = []
    original = engine.scheduler._preempt

    def spy(request: Request) -> None:
        preempted.append(request.order)
        original(request)

    engine.scheduler._preempt = spy  # type: ignore[method-assign]
    alone = [plain(prompt) for prompt in PROMPTS]
    requests = [
        submit(engine, p, planner=tree_planner(p, done)) for p, done in zip(PROMPTS, alone, strict=True)
    ]
    for done, other in zip(alone, finish(engine, *requests), strict=True):
        same(done, other)
    assert preempted
    assert requests[0].order not in preempted  # the oldest always gets on


@pytest.mark.parametrize("pages", range(8, 14))
@pytest.mark.parametrize("max_rows", [5, 9, 64])
def test_answers_that_share_a_prompt_may_start_while_it_is_recomputed(pages: int, max_rows: int) -> None:
    """The first of n answers gives way to an older request; the others come up before it is back in place."""
    engine = engine_for(pages=pages, page_size=8, context_limit=64, max_rows=max_rows)
    planner = FixedPlanner()
    requests, alone = [submit(engine, PROMPTS[3])], [plain(PROMPTS[3])]
    for prompt in (PROMPTS[2], PROMPTS[0]):
        leader = None
        for index in range(4):
            params = SamplingParams(temperature=1.0, max_tokens=30, seed=index)
            request = engine.add(prompt, params, planner, seed=index, leader=leader, index=index)
            leader = leader or request
            requests.append(request)
            alone.append(plain(prompt, params))
    for done, other in zip(alone, finish(engine, *requests), strict=True):
        same(done, other)


def test_more_requests_than_rows_wait_their_turn() -> None:
    engine = engine_for(max_rows=2)
    requests = [submit(engine, prompt) for prompt in PROMPTS * 3]
    engine.step()
    assert sum(request.sequence is not None for request in requests) == 2
    for prompt, done in zip(PROMPTS * 3, finish(engine, *requests), strict=True):
        same(plain(prompt), done)


def test_drafts_share_the_rows_that_are_left() -> None:
    engine = engine_for(max_rows=11)
    planner = FixedPlanner(Oracle(following(*[[*p, *plain(p).tokens] for p in PROMPTS[:3]])), 16)
    lengths = [SamplingParams(temperature=0.0, max_tokens=tokens) for tokens in (30, 30, 90)]
    requests = [submit(engine, p, params, planner) for p, params in zip(PROMPTS[:3], lengths, strict=True)]
    finish(engine, *requests)
    target = engine.target
    assert isinstance(target, StubTarget)
    assert max(target.row_counts) <= 11
    assert max(planner.rooms) == 10  # whoever is last has all rows but its own


def test_a_finished_prompt_is_not_computed_again() -> None:
    engine = engine_for()
    first = run(engine, PROMPTS[0])
    second = run(engine, PROMPTS[0])
    same(first, second)
    assert (first.cached_tokens, second.cached_tokens) == (0, len(PROMPTS[0]) - 1)
    turn = [*PROMPTS[0], *first.tokens, *b"and then"]
    third = run(engine, turn)
    assert third.cached_tokens == len(PROMPTS[0]) + len(first.tokens) - 1  # the last token never had KV
    same(run(engine_for(), turn), third)


def test_accepted_drafts_leave_a_cache_that_serves_the_next_turn() -> None:
    done = plain(PROMPTS[0])
    engine = engine_for()
    for _ in range(20):
        run(engine, PROMPTS[0], planner=tree_planner(PROMPTS[0], done))
        turn = [*PROMPTS[0], *done.tokens, *b"and then"]
        same(run(engine_for(), turn), run(engine, turn, planner=tree_planner(turn, run(engine_for(), turn))))


# --- leaving early -------------------------------------------------------------------------------------


def steps(count: int) -> Callable[[Engine], None]:
    def run_steps(engine: Engine) -> None:
        for _ in range(count):
            engine.step()

    return run_steps


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_x29_cancelling_in_any_phase_frees_everything_at_once(phase: str) -> None:
    """One hundred times beside a client that must not notice."""
    alone = plain(PROMPTS[0], SamplingParams(temperature=0, max_tokens=300))
    engine = engine_for(max_rows=4 if phase == "prefill" else 64)
    planner = tree_planner(PROMPTS[0], alone)
    other = submit(engine, PROMPTS[0], SamplingParams(temperature=0, max_tokens=300), planner)
    engine.step()
    leaver = FixedPlanner(Oracle(following([*PROMPTS[2], *plain(PROMPTS[2]).tokens])), 8)
    for i in range(100):
        request = submit(engine, [i, *PROMPTS[2]], planner=leaver)
        steps({"queued": 0, "prefill": 1, "decode": 4}[phase])(engine)
        assert (request.generated > 0) == (phase == "decode")
        held = engine.cache.available
        engine.abort(request)
        assert request.completion is not None
        assert request.completion.finish_reason == "abort"
        assert request.sequence is None
        assert request.context.request in leaver.forgotten
        if phase != "queued":
            assert engine.cache.available > held
        engine.cache.check_integrity()
        if other.over:
            break
    same(alone, finish(engine, other)[0])
    same(plain(PROMPTS[1]), run(engine, PROMPTS[1]))
    assert engine.idle
    assert engine.cache.available == engine.cache.pages


def test_x29_cancelling_a_queued_request_with_one_slot() -> None:
    engine = engine_for(max_rows=1)
    active = submit(engine, PROMPTS[0])
    queued = submit(engine, PROMPTS[1])
    engine.step()
    assert queued.sequence is None
    engine.abort(queued)
    engine.abort(queued)
    same(plain(PROMPTS[0]), finish(engine, active)[0])
    assert engine.idle


# --- things that break ----------------------------------------------------------------------------------


class Broken(FixedPlanner):
    """Raises from one of its methods, at its second call."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.calls = 0
        setattr(self, method, self.fail)

    def fail(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("broken on purpose")


def test_an_error_of_one_request_ends_that_request_alone() -> None:
    engine = engine_for()
    good = submit(engine, PROMPTS[0])
    bad = submit(engine, PROMPTS[1], planner=Broken("commit"))
    with pytest.raises(ValueError, match="broken on purpose"):
        finish(engine, bad)
    same(plain(PROMPTS[0]), finish(engine, good)[0])
    same(plain(PROMPTS[1]), run(engine, PROMPTS[1]))


def test_a_failing_pass_ends_its_requests_and_the_engine_serves_the_next() -> None:
    engine = engine_for()
    target = engine.target
    assert isinstance(target, StubTarget)
    request = submit(engine, PROMPTS[0])
    steps(3)(engine)
    target.fail = MemoryError("no memory on purpose")
    with pytest.raises(MemoryError):
        finish(engine, request)
    same(plain(PROMPTS[0]), run(engine, PROMPTS[0]))
    assert engine.cache.available == engine.cache.pages


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "prompt is empty"), ([5, VOCAB_SIZE], f"token id {VOCAB_SIZE}"), ([-1], "token id -1")],
)
def test_prompts_that_cannot_be_served_are_refused_by_name(prompt: list[int], message: str) -> None:
    engine = engine_for()
    with pytest.raises(RequestError, match=message):
        submit(engine, prompt)
    with pytest.raises(RequestError, match="prediction"):
        submit(engine, [1], prediction=[VOCAB_SIZE])
    assert engine.idle


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that runs in the engine, as Ctrl-C might."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        ours = ("/engine/", "/models/kv", "/sampling/", "/text/stream")
        return self._line if any(part in frame.f_code.co_filename for part in ours) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.left -= 1
            if self.left < 0:
                sys.settrace(self._before)
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_ctrl_c_at_any_line_of_a_step_leaves_the_text_as_it_would_have_been(params: SamplingParams) -> None:
    alone = [plain(prompt, params) for prompt in PROMPTS]
    truths = following(*[[*p, *done.tokens] for p, done in zip(PROMPTS, alone, strict=True)])
    interrupted = 0
    for line in range(0, 3000, 47):
        engine = engine_for(pages=20)
        planner = FixedPlanner(RandomTree(VOCAB_SIZE, line, next_token=truths, truth=0.8), 6)
        requests = [submit(engine, prompt, params, planner) for prompt in PROMPTS]
        steps(line % 7)(engine)
        try:
            with Interrupt(line):
                engine.step()
                engine.step()
        except KeyboardInterrupt:
            interrupted += 1
        for done, other, request in zip(alone, finish(engine, *requests), requests, strict=True):
            same(done, other)
            chunks = request.chunks
            assert "".join(chunk.text for chunk in chunks) == done.text
            assert [token for chunk in chunks for token in chunk.tokens] == done.tokens
        assert engine.cache.available == engine.cache.pages
    assert interrupted > 30


def test_the_context_is_the_drafters_to_read() -> None:
    """A drafter sees exactly the committed text, at every step."""
    engine = engine_for()
    done = plain(PROMPTS[0])
    truth = [*PROMPTS[0], *done.tokens]
    seen: list[int] = []

    class Watching(Oracle):
        def propose(self, context: Context, budget: int):  # type: ignore[no-untyped-def]
            assert context.tokens == truth[: len(context.tokens)]
            assert context.prompt_length == len(PROMPTS[0])
            seen.append(len(context.tokens))
            return super().propose(context, budget)

    run(engine, PROMPTS[0], planner=FixedPlanner(Watching(following(truth)), 3))
    assert seen == sorted(set(seen))
    assert seen[0] == len(PROMPTS[0]) + 1


def test_rule_and_tokenizer_agree() -> None:
    assert RULE.vocab_size == TOKENIZER.vocab_size == VOCAB_SIZE
