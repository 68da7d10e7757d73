"""`paceline bench` on servers under load: flags, what is written, exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.cli.bench import ArmFlags
from paceline.cli.bench_load import LoadFlags
from paceline.cli.main import run
from paceline.errors import UsageError
from paceline.tools.load import Arrivals, Clients
from support.scripted_server import answer, scripted_server

BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy"


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": f"text {i}"}) + "\n" for i in range(6)))
    return str(path)


def test_a_sweep_of_two_servers(prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "o.json"), "--html", str(tmp_path / "o.html")]
    with scripted_server(*answer("a", "b", tokens=4)) as one, scripted_server(*answer("c", tokens=2)) as two:
        against = ["--against", f"one={one.url},two={two.url}/v1"]
        load = ["--concurrency", "1,2", "-n", "7", "--temperature", "0.5", "--seed", "3"]
        code = run(["bench", "--prompts", prompts, *against, *load, *files])
    out, err = capsys.readouterr()
    assert code == 0
    heading, *rows = out.splitlines()
    assert heading.split()[:3] == ["load", "server", "tokens/s"]
    beginnings = ("1 client   one  ", "           two  ", "2 clients  one  ", "           two  ")
    assert len(rows) == 4
    assert all(row.startswith(start) for row, start in zip(rows, beginnings, strict=True))
    assert "tokens from the servers' usage" in err
    assert "failed" not in err
    assert {body["seed"] for _, body in one.asked} == {3}
    assert [body["max_tokens"] for _, body in two.asked] == [8, *[7] * 6]  # the first only warms up
    found = json.loads((tmp_path / "o.json").read_text())
    assert (found["paceline_load"], found["servers"], found["asked"]) == (1, ["one", "two"], 6)
    assert found["settings"]["concurrency"] == "1,2"
    assert [len(cell["replies"]) for cell in found["cells"]] == [3, 3, 3, 3]
    assert found["models"] == {"one": "m", "two": "m"}
    assert (tmp_path / "o.html").read_text().startswith("<!doctype html>")


def test_failed_requests_are_named_and_fail_the_run(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(BUSY) as script:
        load = ["--request-rate", "1000", "--burstiness", "0.5", "--json", "-"]
        code = run(["bench", "--prompts", prompts, "--against", script.url, *load])
    out, err = capsys.readouterr()
    assert code == 1
    assert err.count("failed: prompt 0 on") == 1
    assert "answered 429: busy" in err
    assert json.loads(out)["cells"][0]["figures"]["errors"] == {"HTTP 429": 6}


def test_repeated_prompts_are_told(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(*answer("a", tokens=1)) as script:
        load = ["--concurrency", "1,6", "--repeat", "2", "--raw"]
        assert run(["bench", "--prompts", prompts, "--against", script.url, *load]) == 0
    assert "12 requests of 6 prompts: caches may have helped" in capsys.readouterr().err
    assert {path for path, _ in script.asked} == {"/v1/completions"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1"], "no server to put under load"),
        (["--concurrency", "1", "--request-rate", "2"], "two kinds of load"),
        (["--concurrency", "0"], "--concurrency has 0"),
        (["--concurrency", "1,two"], "--concurrency has 'two'"),
        (["--concurrency", "1.5"], "--concurrency has '1.5'"),
        (["--concurrency", "4097"], "--concurrency has 4097"),
        (["--concurrency", ""], "--concurrency has ''"),
        (["--concurrency", "4,4"], "with a level twice"),
        (["--request-rate", "nan"], "--request-rate has nan"),
        (["--request-rate", "-1"], "--request-rate has -1"),
        (["--request-rate", "1", "--burstiness", "0"], "--burstiness is 0.0"),
        (["--request-rate", "1", "--burstiness", "nan"], "--burstiness is nan"),
        (["--concurrency", "1", "--timeout", "0"], "--timeout is 0.0"),
        (["--concurrency", "7"], "6 prompts are 6 for each level, too few for 7 clients"),
        (
            ["--concurrency", "1", "--speculate", "off"],
            "--speculate is for measuring a model in this process",
        ),
        (["smollm2", "--concurrency", "1"], "MODEL is for measuring a model in this process"),
        (["--threads", "1", "--concurrency", "1"], "--threads is for measuring a model in this process"),
        (["--timeout", "3"], "--timeout is for servers under load"),
        (["--burstiness", "3"], "--burstiness is for servers under load"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    prompts: str, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], message: str
) -> None:
    with scripted_server(*answer("a", tokens=1)) as script:
        against = [] if "no server" in message else ["--against", script.url]
        assert run(["bench", *arguments, "--prompts", prompts, *against]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "hint: " in err
    assert (out, script.asked) == ("", [])


def test_levels() -> None:
    assert LoadFlags(concurrency="1,16").levels(0) == [Clients(1), Clients(16)]
    assert LoadFlags(request_rate="0.5,inf", burstiness=2.0).levels(7) == [
        Arrivals(0.5, 2.0, 7),
        Arrivals(float("inf"), 2.0, 7),
    ]


def test_variables_meant_for_other_runs_do_no_harm(prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_THREADS", "1")
    monkeypatch.setenv("PACELINE_MODEL", "smollm2")
    with scripted_server(*answer("a", tokens=1)) as script:
        assert run(["bench", "--prompts", prompts, "--against", script.url, "--concurrency", "1"]) == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["http://a:1,http://b:2"], [("", "http://a:1"), ("", "http://b:2")]),
        (["x=http://a:1/v1, y=https://b:2"], [("x", "http://a:1/v1"), ("y", "https://b:2")]),
        (["http://a:1/?q=1,2"], [("", "http://a:1/?q=1,2")]),
        (["x=http://a:1", "b:2"], [("x", "http://a:1"), ("", "b:2")]),
    ],
)
def test_servers_come_one_by_one_or_in_a_list(given: list[str], expected: list[tuple[str, str]]) -> None:
    assert ArmFlags(against=given).servers() == expected


def test_burstiness_without_arrivals_is_refused() -> None:
    with pytest.raises(UsageError, match="--burstiness needs --request-rate"):
        LoadFlags(concurrency="1", burstiness=2.0).check(["concurrency", "burstiness"])
