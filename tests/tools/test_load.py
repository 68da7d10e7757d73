"""Levels, arrivals, turns and failures of load tests; servers are functions, or scripted byte for byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.tools.load import Arrivals, Clients, Level, asking, deal, sweep
from paceline.tools.load_figures import Reply
from paceline.tools.peer_client import Answer, PeerError, Server
from paceline.tools.prompts import Prompt
from support.scripted_server import answer, scripted_server

PARAMS = SamplingParams(temperature=0.0, max_tokens=9)


def some_prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), f"c{i % 2}", f"text {i}") for i in range(count)]


def answered(prompt: Prompt) -> Answer:
    now = time.perf_counter()
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return Answer(now, now, [now], {0: f"to {prompt.text}"}, {0: "stop"}, usage)


def nothing() -> None:
    pass


def test_so_many_clients_ask_at_once_and_no_more() -> None:
    together = threading.Barrier(4)
    lock = threading.Lock()
    running: list[int] = [0]
    most: list[int] = []

    def ask(prompt: Prompt) -> Answer:
        with lock:
            running[0] += 1
            most.append(running[0])
        together.wait(60)  # passes only if four are here
        with lock:
            running[0] -= 1
        return answered(prompt)

    replies = Clients(4).run(ask, some_prompts(8), nothing)
    assert max(most) == 4
    assert [(r.prompt, r.category, r.text) for r in replies] == [
        (str(i), f"c{i % 2}", f"to text {i}") for i in range(8)
    ]


def test_clients_take_prompts_in_order() -> None:
    asked: list[str] = []

    def ask(prompt: Prompt) -> Answer:
        asked.append(prompt.name)
        return answered(prompt)

    Clients(1).run(ask, some_prompts(5), nothing)
    assert asked == ["0", "1", "2", "3", "4"]


def test_arrivals_do_not_wait_for_answers() -> None:
    together = threading.Barrier(6)

    def ask(prompt: Prompt) -> Answer:
        together.wait(60)  # passes only if all have arrived
        return answered(prompt)

    replies = Arrivals(rate=1000.0).run(ask, some_prompts(6), nothing)
    assert [r.prompt for r in replies] == ["0", "1", "2", "3", "4", "5"]
    assert [r.due_s for r in replies] == Arrivals(rate=1000.0).times(6)


@pytest.mark.parametrize("level", [Clients(3), Arrivals(rate=1e4)])
def test_every_request_is_accounted_for(level: Level) -> None:
    def ask(prompt: Prompt) -> Answer:
        if int(prompt.name) % 3 == 0:
            raise PeerError("refused", "busy", status=429)
        found = answered(prompt)
        if int(prompt.name) % 3 == 1:
            found.usage = None
        return found

    count: list[None] = []
    replies = level.run(ask, some_prompts(10), lambda: count.append(None))
    assert [r.error for r in replies] == ["HTTP 429", "no usage", ""] * 3 + ["HTTP 429"]
    assert [r.completion_tokens for r in replies] == [0, 0, 2] * 3 + [0]
    assert (replies[0].message, len(count)) == ("busy", 10)


def test_latency_counts_from_the_moment_a_request_was_due() -> None:
    def ask(prompt: Prompt) -> Answer:
        time.sleep(0.02)  # whatever happens before sending is the generator's fault, not to be hidden
        return answered(prompt)

    replies = Arrivals(rate=1e6).run(ask, some_prompts(3), nothing)
    assert all(r.first_token_s >= 0.02 for r in replies)


@given(
    st.integers(2, 200),
    st.floats(0.01, 1000.0),
    st.sampled_from([0.1, 1.0, 5.0, float("inf")]),
    st.integers(0, 2**32),
)
def test_arrivals_come_at_the_rate_asked(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = Arrivals(rate, burstiness, seed).times(count)
    assert len(times) == count
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx((count - 1) / rate)
    assert times == Arrivals(rate, burstiness, seed).times(count)


def test_few_arrivals() -> None:
    assert Arrivals(2.0).times(0) == []
    assert Arrivals(2.0).times(1) == [0.0]
    assert Arrivals(2.0).times(2) == [0.0, 0.5]
    assert Arrivals(float("inf")).times(3) == [0.0, 0.0, 0.0]
    assert Arrivals(4.0, float("inf")).times(4) == [0.0, 0.25, 0.5, 0.75]


def test_other_seeds_arrive_otherwise() -> None:
    assert Arrivals(1.0, seed=1).times(9) != Arrivals(1.0, seed=2).times(9)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    """Mean 1 and variance 1/burstiness; at 1 the exponential's median, ln 2, sets Poisson apart."""
    gaps = np.diff(Arrivals(1.0, burstiness, seed=5).times(40_001))
    assert gaps.mean() == pytest.approx(1.0)
    assert gaps.var() == pytest.approx(1 / burstiness, rel=0.06)
    if burstiness == 1.0:
        assert np.median(gaps) == pytest.approx(np.log(2), rel=0.02)
        counts = np.bincount(np.floor(np.cumsum(gaps)).astype(int))[:-1]
        assert counts.var() == pytest.approx(1.0, rel=0.06)  # as many as the mean: Poisson


def test_prompts_are_dealt_in_order_and_none_twice() -> None:
    prompts = some_prompts(11)
    dealt = deal(prompts, [Clients(1), Clients(2), Clients(3)])
    assert [[p.name for p in some] for some in dealt] == [
        ["0", "1", "2", "3"],
        ["4", "5", "6", "7"],
        ["8", "9", "10"],
    ]


def test_more_clients_than_prompts_are_refused() -> None:
    with pytest.raises(UsageError, match="11 prompts are 5 for each level, too few for 6 clients"):
        deal(some_prompts(11), [Clients(1), Clients(6)])
    with pytest.raises(UsageError, match="1 prompts are 0 for each level"):
        deal(some_prompts(1), [Arrivals(1.0), Arrivals(2.0)])


def test_servers_take_turns_and_are_compared_level_by_level() -> None:
    with scripted_server(*answer("a", "b", tokens=8)) as one, scripted_server(*answer("c", tokens=2)) as two:
        servers = [Server(one.url, "one"), Server(two.url, "two")]
        steps: list[None] = []
        report = sweep(
            servers,
            [Clients(1), Clients(2)],
            some_prompts(4),
            PARAMS,
            chat=True,
            timeout=60.0,
            progress=lambda: steps.append(None),
        )
    assert [(c.level, c.server) for c in report.cells] == [
        ("1 client", "one"),
        ("1 client", "two"),
        ("2 clients", "one"),
        ("2 clients", "two"),
    ]
    assert [c.figures.completion_tokens for c in report.cells] == [16, 4, 16, 4]
    assert [[r.prompt for r in c.replies] for c in report.cells] == [["0", "1"]] * 2 + [["2", "3"]] * 2
    for first, other in (report.cells[:2], report.cells[2:]):
        assert first.ratio == 1.0
        ratio = other.figures.output_tokens_per_s / first.figures.output_tokens_per_s
        assert other.ratio == pytest.approx(ratio)
    assert (report.asked, report.distinct, report.differing) == (4, 4, {"one": [], "two": []})
    assert len(steps) == 8
    limits = [body["max_tokens"] for _, body in one.asked]
    assert limits == [8, 9, 9, 9, 9]  # the first only warms up
    assert report.as_json()["paceline_load"] == 1


def test_the_order_of_servers_turns_with_the_level() -> None:
    order: list[str] = []
    with scripted_server(*answer("a", tokens=1)) as one, scripted_server(*answer("a", tokens=1)) as two:
        servers = [Spy(one.url, "one", order.append), Spy(two.url, "two", order.append)]
        sweep(servers, [Clients(1), Clients(2)], some_prompts(4), PARAMS, chat=True, timeout=60.0)
    assert order == ["one", "two", "one", "one", "two", "two", "two", "two", "one", "one"]


class Spy(Server):
    def __init__(self, url: str, name: str, note: Callable[[str], None]) -> None:
        super().__init__(url, name)
        self.note = note

    def ask(self, path: str, body: dict[str, object], *, timeout: float = 1.0) -> Answer:
        self.note(self.name)
        return super().ask(path, body, timeout=timeout)


def test_servers_of_one_name_are_refused() -> None:
    with scripted_server() as script:
        servers = [Server(script.url), Server(script.url)]
        with pytest.raises(UsageError, match="not all different"):
            sweep(servers, [Clients(1)], some_prompts(1), PARAMS, chat=True, timeout=1.0)


def test_a_prompt_is_sent_as_asked_or_as_it_is() -> None:
    chat = Prompt("c", "all", "hi", [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}])
    bare = Prompt("b", "all", "def f")
    with scripted_server(*answer("a", tokens=1)) as script:
        server = Server(script.url)
        for how in (True, False, None):
            for prompt in (chat, bare):
                asking(server, PARAMS, chat=how, timeout=60.0)(prompt)
    found = [(path, "messages" in body) for path, body in script.asked]
    chatted, raw = ("/v1/chat/completions", True), ("/v1/completions", False)
    assert found == [chatted, chatted, raw, raw, chatted, raw]
    assert script.asked[1][1]["messages"] == [{"role": "user", "content": "def f"}]


def test_a_server_that_answers_differently_is_told_on() -> None:
    lock, count = threading.Lock(), [0]

    class Fickle:
        label, wanted = "odd", 1

        def run(self, ask: object, prompts: list[Prompt], done: object) -> list[Reply]:
            with lock:
                count[0] += 1
            common = {"category": "all", "due_s": 0.0, "end_s": 1.0}
            return [Reply(prompt=p.name, text=str(count[0]), **common) for p in prompts]  # type: ignore[arg-type]

    with scripted_server(*answer("a", tokens=1)) as script:
        prompts = some_prompts(2) * 2
        levels = [Fickle(), Fickle()]
        report = sweep([Server(script.url, "s")], levels, prompts, PARAMS, chat=True, timeout=60.0)  # type: ignore[arg-type]
    assert report.differing == {"s": ["0", "1"]}
    assert (report.asked, report.distinct) == (4, 2)
