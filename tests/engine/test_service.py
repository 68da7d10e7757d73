"""The engine on a thread of its own: hundreds of callers, none lost, none stuck, every text as if alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import LLM, RequestError, SamplingParams, UsageError
from paceline.core import Completion, Rows
from paceline.engine import Chunk
from paceline.engine.service import Service
from paceline.errors import PromptTooLongError, QueueFullError, ShuttingDownError
from paceline.planning.pass_time import PassTime
from paceline.planning.planner import Planner
from support.constraints import Pattern
from support.stub_target import RepetitiveRule, StubTarget
from support.tiny_tokenizer import EOS, VOCAB_SIZE, tiny_tokenizer

RULE = RepetitiveRule(VOCAB_SIZE, peak=4.5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PATIENCE = 60.0


def llm_for(**target: Any) -> LLM:
    table = PassTime({1: 1e-3, 8: 1.1e-3, 16: 2e-3})
    return LLM.from_target(StubTarget(RULE, **target), tiny_tokenizer(), pass_time=table)


class Gate(StubTarget):
    """A target whose passes wait until they are let through, so that a test decides what is running."""

    def __init__(self, **options: Any) -> None:
        super().__init__(RULE, **options)
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def forward(self, rows: Rows):  # type: ignore[no-untyped-def]
        self.entered.set()
        assert self.open.wait(PATIENCE)
        return super().forward(rows)

    def hold(self) -> None:
        self.open.clear()
        self.entered.clear()


class Inbox:
    """What one submit delivered."""

    def __init__(self, n: int = 1) -> None:
        self.chunks: list[list[Chunk]] = [[] for _ in range(n)]
        self.errors: list[Exception] = []
        self.first = threading.Event()
        self._left = n
        self._over = threading.Event()

    def __call__(self, item: Chunk | Exception) -> None:
        assert self._left > 0, "something came behind the end"
        if isinstance(item, Exception):
            self.errors.append(item)
            self._left -= 1
        else:
            self.chunks[item.index].append(item)
            self._left -= item.completion is not None
        self.first.set()
        if not self._left:
            self._over.set()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def results(self) -> list[Completion]:
        assert self._over.wait(PATIENCE), "stuck"
        if self.errors:
            raise self.errors[0]
        done = []
        for chunks in self.chunks:
            completion = chunks[-1].completion
            assert completion is not None
            assert "".join(chunk.text for chunk in chunks) == completion.text
            assert [token for chunk in chunks for token in chunk.tokens] == completion.tokens
            done.append(completion)
        return done

    def result(self) -> Completion:
        return self.results()[0]


@pytest.fixture
def gated() -> Iterator[tuple[Gate, LLM]]:
    target = Gate()
    yield target, LLM.from_target(target, tiny_tokenizer(), pass_time=PassTime({1: 1e-3}))
    target.open.set()


def settled(llm: LLM) -> bool:
    llm.engine.cache.check_integrity()
    return llm.engine.idle and llm.engine.cache.available == llm.engine.cache.pages


def test_what_is_delivered_is_what_generate_returns() -> None:
    llm = llm_for()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, logprobs=2, n=3)
    alone = llm_for().generate(["hello hello"], params)
    with Service(llm) as service:
        inbox = Inbox(3)
        ticket = service.submit("hello hello", params, deliver=inbox)
        for one, other in zip(alone, inbox.results(), strict=True):
            assert (one.text, one.tokens, one.logprobs) == (other.text, other.tokens, other.logprobs)
        assert (ticket.prompt_tokens, ticket.seed) == (alone[0].prompt_tokens, 3)
        assert service.drain(PATIENCE)
    assert settled(llm)


def test_every_option_reaches_the_request() -> None:
    pattern = Pattern([range(97, 123), [32], [44, 45]], 10, EOS, VOCAB_SIZE)
    with Service(llm_for()) as service:
        inboxes = [Inbox() for _ in range(4)]
        service.submit("abcabcabc", GREEDY, deliver=inboxes[0], constraint=pattern)
        service.submit("abcabcabc", GREEDY, deliver=inboxes[1], speculate="off")
        service.submit("abcabcabc", GREEDY, deliver=inboxes[2], max_draft=1)
        expected = list(llm_for().generate("abcabcabc", GREEDY).tokens)
        service.submit("abcabcabc", GREEDY, deliver=inboxes[3], prediction=expected)
        constrained, off, short, predicted = [inbox.result() for inbox in inboxes]
    assert constrained.tokens[1] == 32
    assert constrained.tokens[-1] == EOS
    assert constrained.speculation.by_drafter["grammar"].accepted > 0
    assert off.tokens == short.tokens == predicted.tokens == expected
    assert off.speculation.off_reason == "speculation is off"
    assert max(len(off.tokens), 1) >= short.speculation.drafted == short.speculation.drafts > 0
    assert predicted.speculation.by_drafter["prediction"].accepted > 0


@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_requests_of_which_a_quarter_leaves(seed: int) -> None:
    """Cancelled at random moments, by several threads, on a cache too small for all of them."""
    llm = llm_for(pages=60)
    prompts = ["hello", "the cat sat on the mat " * 3, "abcabcabcabc", "x" * 90, ""]
    alone = [llm_for().generate(prompt, GREEDY) for prompt in prompts]
    service = Service(llm, max_queue=1_000)
    inboxes: list[tuple[int, bool, Inbox]] = []

    def client(number: int) -> None:
        rng = random.Random(1_000 * seed + number)
        for _ in range(40):
            which, leaves, inbox = rng.randrange(len(prompts)), rng.random() < 0.25, Inbox()
            speculate = rng.choice(["auto", "ngram", "off"])
            ticket = service.submit(prompts[which], GREEDY, deliver=inbox, speculate=speculate)
            inboxes.append((which, leaves, inbox))
            if leaves:
                if rng.random() < 0.5:
                    inbox.first.wait(rng.random() * 0.02)
                ticket.cancel()
                ticket.cancel()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert service.drain(PATIENCE)
    for which, leaves, inbox in inboxes:
        done = inbox.result()
        assert done.finish_reason == alone[which].finish_reason or leaves
        assert done.tokens == alone[which].tokens[: len(done.tokens)]
        if done.finish_reason != "abort":
            assert done.tokens == alone[which].tokens
    stats = service.snapshot()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
    assert stats.generated_tokens >= sum(len(inbox.result().tokens) for _, _, inbox in inboxes)
    service.close()
    assert settled(llm)


def test_direct_calls_and_the_service_share_the_model() -> None:
    llm = llm_for()
    alone = llm_for().generate("abcabcabc", SamplingParams(temperature=0.0, max_tokens=200)).tokens
    with Service(llm) as service:
        inboxes = [Inbox() for _ in range(4)]
        for inbox in inboxes:
            service.submit("abcabcabc", SamplingParams(temperature=0.0, max_tokens=200), deliver=inbox)
        direct = llm.generate("abcabcabc", SamplingParams(temperature=0.0, max_tokens=200))
        assert direct.tokens == alone
        assert all(inbox.result().tokens == alone for inbox in inboxes)
    assert llm.generate("abcabcabc", SamplingParams(temperature=0.0, max_tokens=200)).tokens == alone
    assert settled(llm)


# --- leaving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_cancelled_request_holds_nothing_after_the_pass_that_runs(
    gated: tuple[Gate, LLM], phase: str
) -> None:
    target, llm = gated
    with Service(llm, max_num_seqs=1) as service:
        if phase == "queued":
            target.hold()
            other = Inbox()
            service.submit("other", GREEDY, deliver=other)
            assert target.entered.wait(PATIENCE)
        elif phase == "prefill":
            target.hold()
        inbox = Inbox()
        ticket = service.submit("abcabcabc", SamplingParams(max_tokens=400, ignore_eos=True), deliver=inbox)
        if phase == "decode":
            assert inbox.first.wait(PATIENCE)
            target.hold()
        assert target.entered.wait(PATIENCE)
        passes = target.passes
        ticket.cancel()
        target.open.set()
        assert inbox.result().finish_reason == "abort"
        if phase != "queued":
            assert target.passes <= passes + 1
        assert service.drain(PATIENCE)
    assert settled(llm)


def test_close_cancels_what_is_left_and_ends_the_thread(gated: tuple[Gate, LLM]) -> None:
    target, llm = gated
    service = Service(llm)
    target.hold()
    inboxes = [Inbox() for _ in range(3)]
    for inbox in inboxes:
        service.submit("abc", GREEDY, deliver=inbox)
    assert not service.drain(0.01)
    threading.Timer(0.05, target.open.set).start()
    service.close()
    service.close()
    assert all(inbox.result().finish_reason in ("abort", "length", "stop") for inbox in inboxes)
    with pytest.raises(ShuttingDownError):
        service.submit("abc", GREEDY, deliver=Inbox())
    assert "paceline-engine" not in [thread.name for thread in threading.enumerate()]
    assert settled(llm)


def test_drain_finishes_what_runs_and_refuses_the_rest(gated: tuple[Gate, LLM]) -> None:
    target, llm = gated
    with Service(llm) as service:
        target.hold()
        inbox = Inbox()
        service.submit("abc", GREEDY, deliver=inbox)
        threading.Timer(0.05, target.open.set).start()
        assert service.drain(PATIENCE)
        assert inbox.done
        with pytest.raises(ShuttingDownError):
            service.submit("abc", GREEDY, deliver=Inbox())


# --- refusals ------------------------------------------------------------------------------------------


def test_the_queue_has_a_limit_and_says_so(gated: tuple[Gate, LLM]) -> None:
    target, llm = gated
    with Service(llm, max_queue=2, max_num_seqs=1) as service:
        target.hold()
        first = Inbox()
        service.submit("abc", GREEDY, deliver=first)
        assert target.entered.wait(PATIENCE)
        others = [Inbox(), Inbox()]
        for inbox in others:
            service.submit("abc", GREEDY, deliver=inbox)
        assert (service.snapshot().running, service.snapshot().waiting) == (1, 2)
        with pytest.raises(QueueFullError, match="2 requests wait already; the limit is 2") as refused:
            service.submit("abc", GREEDY, deliver=Inbox())
        assert (refused.value.waiting, refused.value.limit) == (2, 2)
        target.open.set()
        assert all(inbox.result().finish_reason for inbox in [first, *others])
        later = Inbox()
        service.submit("abc", GREEDY, deliver=later)
        assert later.result().tokens == first.result().tokens


def test_what_cannot_be_served_is_refused_at_once() -> None:
    with Service(llm_for()) as service:
        with pytest.raises(
            PromptTooLongError, match="the prompt has 600 tokens; the context limit is 512"
        ) as long:
            service.submit([1] * 600, GREEDY, deliver=Inbox())
        assert (long.value.tokens, long.value.limit) == (600, 512)
        for bad in ({"speculate": "nonsense"}, {"max_draft": -1}, {"prediction": [VOCAB_SIZE]}):
            with pytest.raises((RequestError, UsageError)):
                service.submit("abc", GREEDY, deliver=Inbox(), **bad)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="logit_bias"):
            service.submit("abc", SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), deliver=Inbox())
        assert service.snapshot().waiting == 0
        inbox = Inbox()
        service.submit("abc", SamplingParams(max_tokens=0), deliver=inbox)
        assert (inbox.result().tokens, inbox.result().finish_reason) == ([], "length")


@pytest.mark.parametrize("limits", [{"max_queue": -1}, {"max_queue": 1.5}, {"max_num_seqs": 0}])
def test_limits_that_mean_nothing_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(limits))):
        Service(llm_for(), **limits)


# --- things that break ---------------------------------------------------------------------------------


def test_a_failing_pass_ends_its_requests_and_the_next_are_served() -> None:
    target = StubTarget(RULE)
    llm = LLM.from_target(target, tiny_tokenizer(), pass_time=PassTime({1: 1e-3}))
    truth = llm.generate("abc", GREEDY).tokens
    with Service(llm) as service:
        for _ in range(3):
            target.fail = MemoryError("broken on purpose")
            broken, sound = Inbox(), Inbox()
            service.submit("abc", GREEDY, deliver=broken)
            with pytest.raises(MemoryError, match="broken on purpose"):
                broken.result()
            service.submit("abc", GREEDY, deliver=sound)
            assert sound.result().tokens == truth
    assert settled(llm)


@pytest.mark.parametrize("method", ["plan", "commit", "forget", "off_reason"])
def test_a_planner_that_breaks_takes_down_its_own_requests(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_for()
    truth = llm.generate("abc", GREEDY, speculate="off").tokens

    def broken(self: Planner, *arguments: Any, **named: Any) -> Any:
        if self.speculates:
            raise ValueError("broken on purpose")
        return original(self, *arguments, **named)

    original = getattr(Planner, method)
    monkeypatch.setattr(Planner, method, broken)
    with Service(llm) as service:
        bad, good = Inbox(), Inbox()
        service.submit("abc", GREEDY, deliver=bad)
        service.submit("abc", GREEDY, deliver=good, speculate="off")
        assert good.result().tokens == truth
        if method != "off_reason":  # that one is only asked where nothing was drafted
            assert bad._over.wait(PATIENCE)
        monkeypatch.undo()
        again = Inbox()
        service.submit("abc", GREEDY, deliver=again)
        assert again.result().tokens == truth
        assert service.drain(PATIENCE)
    assert settled(llm)


def test_a_step_that_breaks_somewhere_else_ends_requests_and_not_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = llm_for()
    truth = llm.generate("abc", GREEDY).tokens
    with Service(llm) as service:
        original = llm.engine.scheduler.schedule

        def broken() -> Any:
            monkeypatch.setattr(llm.engine.scheduler, "schedule", original)
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(llm.engine.scheduler, "schedule", broken)
        bad, good = Inbox(), Inbox()
        service.submit("abc", GREEDY, deliver=bad)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            bad.result()
        service.submit("abc", GREEDY, deliver=good)
        assert good.result().tokens == truth
    assert "a step failed" in caplog.text
    assert settled(llm)


def test_a_receiver_that_breaks_loses_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    llm = llm_for()

    def broken(item: Chunk | Exception) -> None:
        raise ValueError("broken on purpose")

    with Service(llm) as service:
        service.submit("abc", SamplingParams(max_tokens=400, ignore_eos=True), deliver=broken)
        inbox = Inbox()
        service.submit("abc", GREEDY, deliver=inbox)
        assert inbox.result().finish_reason
        assert service.drain(PATIENCE)
    assert "could not be delivered" in caplog.text
    assert settled(llm)


# --- numbers -------------------------------------------------------------------------------------------


def test_counters_add_up_over_requests() -> None:
    llm = llm_for()
    with Service(llm) as service:
        inboxes = [Inbox() for _ in range(6)]
        for inbox in inboxes:
            service.submit("abcabcabcabc", GREEDY, deliver=inbox)
        done = [inbox.result() for inbox in inboxes]
        stats = service.snapshot()
    speculation = [one.speculation for one in done]
    assert stats.prompt_tokens == stats.prefix_queries == sum(one.prompt_tokens for one in done)
    assert stats.prefix_hits == sum(one.cached_tokens for one in done)
    assert stats.generated_tokens == sum(len(one.tokens) for one in done)
    assert stats.drafts == sum(one.drafts for one in speculation)
    assert stats.drafted == sum(one.drafted for one in speculation) > 0
    assert stats.accepted == sum(one.accepted for one in speculation) > 0
    assert stats.accepted_per_position[0] == sum(one.accepted_per_position[0] for one in speculation)
    assert sum(one.drafted for one in stats.by_drafter.values()) == stats.drafted
    assert stats.passes == len(llm.engine.target.row_counts)  # type: ignore[attr-defined]
    assert stats.preemptions == 0


def test_nothing_runs_while_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_for()
    steps: list[None] = []
    step = llm.step
    monkeypatch.setattr(llm, "step", lambda: (steps.append(None), step()))
    with Service(llm) as service:
        for _ in range(2):  # asleep, it wakes
            inbox = Inbox()
            service.submit("abc", GREEDY, deliver=inbox)
            inbox.result()
        assert service.drain(PATIENCE)
        before = len(steps)
        time.sleep(0.1)
        assert len(steps) == before > 0
