"""The soak test's own bookkeeping: nothing it is told may be lost, and a difference must show."""

from __future__ import annotations

from harness.storm import Case, Moment, Weather, growth, make_cases, serially, still_busy
from harness.tasks import OWN_PROMPTS

from paceline.tools import prompts
from paceline.tools.peer_client import Server
from support.scripted_server import HANG, answer, scripted_server

BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy"
CASE = Case(0, "/completions", {"prompt": "x"})


def test_cases_are_of_every_kind_and_the_same_every_time() -> None:
    some = prompts.load(OWN_PROMPTS)
    cases = make_cases(some, 300, 12, seed=1)
    assert cases == make_cases(some, 300, 12, seed=1)
    assert cases[:10] == make_cases(some, 10, 12, seed=1)
    assert cases != make_cases(some, 300, 12, seed=2)
    assert {case.path for case in cases} == {"/completions", "/chat/completions"}
    used = {name for case in cases for name in case.body}
    assert used >= {
        "n",
        "stop",
        "logprobs",
        "prediction",
        "response_format",
        "speculation",
        "top_p",
        "messages",
    }
    assert all(1 <= case.body["max_tokens"] <= 12 for case in cases)
    assert all("seed" in case.body for case in cases)


def test_answers_equal_to_those_alone_are_counted() -> None:
    with scripted_server(*answer("a", tokens=3)) as script:
        server = Server(script.url)
        alone = serially(server, [CASE])
        weather = Weather(server, [CASE], alone, cancel=0.0, seed=0)
        weather.rage(20, clients=4)
    storm = weather.storm
    assert alone == {0: (((0, "a"),), ((0, "stop"),), 3)}
    assert (storm.equal, storm.cancelled, storm.different, storm.done) == (20, 0, [], 20)
    assert len(storm.latencies_s) == 20
    streamed = [body.get("stream", False) for _, body in script.asked[1:]]
    assert {True, False} == set(streamed)


def test_a_changed_answer_shows() -> None:
    expected = (((0, "b"),), ((0, "stop"),), 3)
    with scripted_server(*answer("a", tokens=3)) as script:
        weather = Weather(Server(script.url), [CASE], {0: expected}, cancel=0.0, seed=0)
        weather.rage(3, clients=1)
    assert weather.storm.equal == 0
    assert [found[2:] for found in weather.storm.different] == [
        ((((0, "a"),), ((0, "stop"),), 3), expected)
    ] * 3


def test_cancelled_and_failed_requests_are_told_apart() -> None:
    with scripted_server(HANG) as script:
        weather = Weather(Server(script.url), [CASE], {}, cancel=1.0, seed=0)
        weather.rage(5, clients=5)
    assert (weather.storm.cancelled, weather.storm.failed, weather.storm.done) == (5, {}, 5)
    with scripted_server(BUSY) as script:
        weather = Weather(Server(script.url), [CASE], {}, cancel=0.0, seed=0)
        weather.rage(5, clients=2)
    assert (weather.storm.failed, weather.storm.done) == ({"HTTP 429": 5}, 5)
    assert "answered 429: busy" in weather.storm.messages["HTTP 429"]


def test_growth_compares_the_second_fifth_with_the_last() -> None:
    moments = [
        Moment(0.0, done, resident) for done, resident in ((0, 5), (20, 100), (39, 110), (50, 7), (90, 135))
    ]
    assert growth(moments, 100) == 30.0
    assert growth(moments[:2], 100) == 0.0


def test_what_still_runs_is_read_from_the_metrics() -> None:
    metrics = (
        '# TYPE paceline:num_requests_running gauge\npaceline:num_requests_running{model_name="m"} 2.0\n'
        'paceline:num_requests_waiting{model_name="m"} 1.0\npaceline:num_requests_waiting_total{x="y"} 9.0\n'
    )

    class Told:
        def get(self, path: str) -> bytes:
            assert path == "/metrics"
            return metrics.encode()

    assert still_busy(Told(), within=0.0) == 3  # type: ignore[arg-type]
    metrics = metrics.replace("2.0", "0.0").replace("1.0", "0.0")
    assert still_busy(Told(), within=60.0) == 0  # type: ignore[arg-type]
