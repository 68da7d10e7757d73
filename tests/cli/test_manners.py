"""Exit codes, clean stdout, closed pipes, odd terminals.

What only a process can show runs as one; the long tables of refusals call the same entry in this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import ALIASES, VERBS, run

PROMPTS = str(Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl")
COMMAND = [sys.executable, "-m", "paceline"]


def paceline(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_") or k == "PACELINE_CACHE"}
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        env=clean | environment,
        timeout=120,
        check=False,
    )


Capture = pytest.CaptureFixture[str]


def here(capture: Capture, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The same as `paceline`, without the second that a process takes."""
    code = run(list(arguments))
    out, err = capture.readouterr()
    return subprocess.CompletedProcess(arguments, code, out.encode(), err.encode())


def refused(done: subprocess.CompletedProcess[bytes], code: int) -> str:
    """Stderr of a run that failed as it should: one message, one hint, nothing on stdout."""
    error = done.stderr.decode()
    assert (done.returncode, done.stdout) == (code, b""), error
    assert "Traceback" not in error
    lines = error.splitlines()
    assert lines[-2].startswith("error: "), error
    assert lines[-1].startswith("hint: "), error
    return error


@pytest.mark.parametrize("arguments", [(), ("-h",), ("--help",)])
def test_help_lists_every_verb(arguments: tuple[str, ...]) -> None:
    done = paceline(*arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    listed = [
        line.split()[0] for line in done.stdout.decode().split("Commands:")[1].splitlines() if line.strip()
    ]
    assert listed == list(VERBS)


def test_help_does_not_load_the_engine() -> None:
    code = "import sys; from paceline.cli.main import run; run(['--help']); print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    heavy = {"numpy", "rich", "tokenizers", "jinja2", "huggingface_hub", "paceline.engine", "paceline.native"}
    assert heavy & set(done.stdout.decode().splitlines()) == set()


@pytest.mark.parametrize("verb", [*VERBS, *ALIASES])
def test_every_verb_has_help(verb: str, capsys: Capture) -> None:
    done = here(capsys, verb, "--help")
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert VERBS[ALIASES.get(verb, verb)] in text
    assert f"paceline {verb}" in text


def test_version() -> None:
    done = paceline("--version")
    assert done.returncode == 0
    assert done.stdout.split()[0] == b"paceline"


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["shwo", "smollm2"], "'show'"),
        (["show", "smollm2", "--jsno"], "--json"),
        (["generate", "smollm2", "x", "--temprature", "1"], "--temperature"),
        (["pull", "smolm2"], "'smollm2'"),
    ],
)
def test_a_misspelt_word_is_refused_with_the_right_one(
    arguments: list[str], suggestion: str, capsys: Capture
) -> None:
    assert suggestion in refused(here(capsys, *arguments), 2)


def test_a_real_process_exits_with_2_too() -> None:
    assert "--json" in refused(paceline("show", "smollm2", "--jsno"), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "no model was given"),
        (["generate", "smollm2", "a", "b"], "unexpected argument 'b'"),
        (["generate", "smollm2", "a", "--file", "b"], "both given"),
        (["generate", "smollm2", "--file", "/nowhere/at/all"], "cannot read --file"),
        (["generate", "smollm2", "a", "--temperature", "-1"], "temperature is -1"),
        (["generate", "smollm2", "a", "--temperature", "hot"], "Invalid value for '--temperature'"),
        (["generate", "smollm2", "a", "--logprobs", "3"], "--logprobs shows nothing without --json"),
        (["generate", "smollm2", "a", "--threads", "0"], "Invalid value for '--threads'"),
        (["doctor", "--threads", "257"], "Invalid value for '--threads'"),
        (["generate", "smollm2", "a", "--speculate", ""], "--speculate names no drafter"),
        (["generate", "smollm2", "a", "--speculate", " , "], "--speculate names no drafter"),
        (["bench", "smollm2", "--prompts", PROMPTS, "--speculate", ","], "--speculate names no arm"),
        (["bench", "smollm2", "--prompts", "/nowhere/at/all"], "cannot read prompts"),
        (["bench", "smollm2", "--prompts", "x", "--json", "/nowhere/at/all"], "no folder /nowhere/at"),
        (["bench", "smollm2", "--prompts", "x", "--warm", "--repeat", "2"], "--warm with --repeat"),
        (["bench", "smollm2", "--prompts", PROMPTS, "--speculate", "off,ngarm"], "no drafter 'ngarm'"),
        (["bench", "smollm2", "--prompts", PROMPTS, "--num-speculative-tokens", "3"], "No such option"),
        (["bench", "smollm2"], "Missing option '--prompts'"),
    ],
)
def test_usage_errors_say_what_and_exit_2(arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in refused(here(capsys, *arguments), 2)


def test_a_missing_file_is_a_failure(tmp_path: Path) -> None:
    assert "does not exist" in refused(paceline("show", str(tmp_path / "absent.gguf")), 1)


def test_a_damaged_file_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    assert str(path) in refused(paceline("show", str(path)), 1)


def test_prompts_that_are_not_utf8_are_refused(smollm2_path: Path) -> None:
    assert "not UTF-8" in refused(paceline("generate", str(smollm2_path), stdin=b"\xff\xfe"), 2)


def test_a_misspelt_variable_is_refused() -> None:
    error = refused(paceline("show", "smollm2", PACELINE_TEMPRATURE="1"), 2)
    assert "nothing reads PACELINE_TEMPRATURE" in error
    assert "PACELINE_TEMPERATURE" in error


def test_a_variable_that_does_not_parse_is_refused() -> None:
    error = refused(paceline("generate", "smollm2", "x", PACELINE_TEMPERATURE="hot"), 2)
    assert "Invalid value for '--temperature'" in error


def test_show_prints_data_on_stdout_only(smollm2_path: Path) -> None:
    done = paceline("show", str(smollm2_path), "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    found = json.loads(done.stdout)
    assert (found["architecture"], found["vocabulary"]) == ("llama", 49152)
    plain = paceline("show", str(smollm2_path))
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert "architecture  llama\n" in plain.stdout.decode()
    template = paceline("show", str(smollm2_path), "--template")
    assert template.stdout.decode() == found["chat_template"] + "\n"


def test_pull_prints_the_path(smollm2_path: Path) -> None:
    done = paceline("pull", "smollm2")
    assert (done.returncode, done.stdout.decode()) == (0, f"{smollm2_path}\n")
    found = json.loads(paceline("pull", "smollm2", "--json").stdout)
    assert found == {"model": "smollm2", "path": str(smollm2_path), "bytes": 98_362_432}


ANSWERS = [["show", "smollm2", "--json"], ["--help"], ["generate", "--help"], ["--version"]]


@pytest.mark.usefixtures("smollm2_path")
@pytest.mark.parametrize("arguments", ANSWERS)
def test_a_closed_pipe_ends_the_program_quietly(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([*COMMAND, *arguments], stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.usefixtures("smollm2_path")
@pytest.mark.parametrize("arguments", ANSWERS)
def test_a_full_disk_is_an_error_without_a_traceback(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, check=False)
    error = done.stderr.decode()
    assert done.returncode == 1
    assert error.startswith("error: [Errno 28]")
    assert "Traceback" not in error
    assert "Exception ignored" not in error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["generate", "smollm2", "hi", "-n", "2"], 0), (["show", "smollm2", "--jsno"], 2), (["show", "/"], 1)],
)
@pytest.mark.usefixtures("smollm2_path")
def test_a_full_disk_under_stderr_changes_nothing_else(arguments: list[str], code: int) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=full, check=False)
    assert (done.returncode, bool(done.stdout)) == (code, code == 0)


def test_ctrl_c_during_the_imports_ends_quietly() -> None:
    code = """
import runpy, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
runpy.run_module("paceline", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_closed_streams_are_no_crash(smollm2_path: Path) -> None:
    command = " ".join([*COMMAND, "generate", str(smollm2_path), "--raw", "-n", "2", "<&-", ">&-"])
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_data_is_utf8_whatever_the_locale(smollm2_path: Path, encoding: str) -> None:
    done = paceline("show", str(smollm2_path), "--json", PYTHONIOENCODING=encoding, LC_ALL="C")
    assert done.returncode == 0
    assert json.loads(done.stdout.decode("utf-8"))["file"] == str(smollm2_path)
