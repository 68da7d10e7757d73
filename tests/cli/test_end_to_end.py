"""The real command, the real kernels, the real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "paceline"]


def paceline(*arguments: str, stdin: str = "", code: int = 0) -> tuple[str, str]:
    done = subprocess.run(
        [*COMMAND, *arguments], input=stdin.encode(), capture_output=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


def test_generate_is_the_same_with_and_without_speculation(smollm2_path: Path) -> None:
    arguments = (
        "generate",
        str(smollm2_path),
        "one two three one two three one",
        "--raw",
        "-n",
        "32",
        "--json",
    )
    plain: dict[str, Any] = json.loads(paceline(*arguments, "--speculate", "off")[0])
    drafted: dict[str, Any] = json.loads(paceline(*arguments, "--speculate", "ngram,suffix", "-t", "1")[0])
    assert (plain["tokens"], plain["text"]) == (drafted["tokens"], drafted["text"])
    assert plain["speculation"]["passes"] == plain["usage"]["completion_tokens"] - 1
    assert plain["timings"]["load_s"] > 0
    assert drafted["speculation"]["passes"] <= plain["speculation"]["passes"]


def test_run_answers_piped_lines(smollm2_path: Path) -> None:
    out, err = paceline("run", str(smollm2_path), "-n", "6", stdin="Hello\n/stats\n/quit\n")
    assert out.strip()
    assert "tokens/s" in err


def test_demo_says_identical(smollm2_path: Path) -> None:
    out, _ = paceline("demo", str(smollm2_path), "-n", "48")
    assert out.splitlines()[-1].split() == ["identical", "yes"]
    found = json.loads(paceline("demo", str(smollm2_path), "-n", "16", "--json")[0])
    assert found["identical"] is True
    assert found["plain"]["tokens"] == found["speculation"]["tokens"]


def test_check_finds_nothing(smollm2_path: Path) -> None:
    out, _ = paceline("check", str(smollm2_path), "--cases", "4", "--json")
    found = json.loads(out)
    assert (found["identical"], found["cases"], found["row_groups"]) == (True, 4, 12)


def test_profile_has_every_kind_of_pass(smollm2_path: Path) -> None:
    found = json.loads(paceline("profile", str(smollm2_path), "--seconds", "0.05", "--json")[0])
    assert [p["rows"] for p in found["passes"]] == [1, 2, 4, 8, 16, 32, 512]
    assert found["kv_bytes_per_token"] == 23040
    assert found["read_bandwidth"] > 0
    assert 50e6 < found["weight_bytes"] < 200e6


def test_doctor_is_content() -> None:
    found = json.loads(paceline("doctor", "--json")[0])
    assert found["problems"] == []
    assert found["kernels"][-1] == "portable"


def test_bench_writes_its_three_reports(smollm2_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "a", "category": "code", "prompt": "def f(x):\n    return x\n\ndef g(x):\n"},
        {"id": "b", "category": "prose", "turns": ["Hello!"]},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    files = ("--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html"))
    arguments = ("bench", str(smollm2_path), "--prompts", str(prompts), "-n", "16", "--speculate", "off,auto")
    out, err = paceline(*arguments, *files)
    assert "overall" in out
    assert "identical: off, auto wrote the same tokens for every prompt" in err
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["arms"] == ["off", "auto"]
    assert found["overall"]["figures"]["off"]["prompts"] == 2
    assert found["provenance"]["argv"][-1] == str(tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("verb", ["generate", "run"])
def test_ctrl_c_exits_with_130(smollm2_path: Path, verb: str) -> None:
    arguments = ["generate", str(smollm2_path), "Tell a story", "--ignore-eos"]
    if verb == "run":
        arguments = ["run", str(smollm2_path), "--ignore-eos"]
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Tell a story\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    if verb == "run":  # the first one stopped the answer; wait for the word, then leave
        assert process.stderr is not None
        while b"again leaves" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"Traceback" not in err


def test_a_reader_that_leaves_ends_the_answer_quietly(smollm2_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", str(smollm2_path), "Tell a story", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""
    process.stderr.close()
