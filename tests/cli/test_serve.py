"""`paceline serve`: its flags, from the command line, the environment and a file; and the real program."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import LLM, SamplingParams
from paceline.cli import main, serve
from paceline.cli.main import load_verb
from paceline.server import run
from paceline.server.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")

# One telling value per flag, as typed, and where it must arrive.
FLAGS: dict[str, tuple[str, str, Any]] = {
    "host": ("0.0.0.0", "host", "0.0.0.0"),
    "port": ("0", "port", 0),
    "served_model_name": ("mine", "names", ("mine",)),
    "api_key": ("k", "api_key", "k"),
    "cors_origins": ("https://a.b", "cors_origins", ("https://a.b",)),
    "max_num_seqs": ("3", "max_num_seqs", 3),
    "max_queue": ("0", "max_queue", 0),
    "max_draft": ("5", "max_draft", 5),
    "request_timeout": ("1.5", "request_timeout_s", 1.5),
    "max_body_bytes": ("2048", "max_body_bytes", 2048),
    "log_level": ("error", "log_level", "error"),
}
LOADING: dict[str, tuple[str, Any]] = {
    "max_num_seqs": ("3", 3),
    "max_num_batched_tokens": ("32", 32),
    "threads": ("2", 2),
    "max_model_len": ("64", 64),
    "speculate": ("ngram", "ngram"),
}


class Seen:
    """What a command line would have served."""

    arrived: dict[str, Any]
    load: run.Load


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()

    def record(settings: Settings, load: run.Load, **more: Any) -> bool:
        found.arrived = {name: getattr(settings, name) for name in settings.__slots__} | more
        found.load = load
        return True

    monkeypatch.setattr(run, "serve", record)
    return found


def flag_names(name: str) -> list[str]:
    return next(list(p.opts) for p in load_verb("serve").params if p.name == name)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_its_variable_and_the_file_arrive(
    name: str, seen: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    typed, where, expected = FLAGS[name]
    assert main.run(["serve"]) == 0
    assert seen.arrived[where] != expected
    for flag in flag_names(name):
        assert main.run(["serve", flag, typed]) == 0
        assert seen.arrived[where] == expected
        file = tmp_path / "config.yaml"
        file.write_text(f"{flag.lstrip('-')}: {typed}\n")
        assert main.run(["serve", "--config", str(file)]) == 0
        assert seen.arrived[where] == expected
    monkeypatch.setenv(f"PACELINE_{name.upper()}", typed)
    assert main.run(["serve"]) == 0
    assert seen.arrived[where] == expected


def test_the_command_line_beats_the_environment_which_beats_the_file(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "max_queue: 1\nserved-model-name: [file, other]\ncors-origins: http://file\napi-key: null\n"
    )
    monkeypatch.setenv("PACELINE_CONFIG", str(file))
    assert main.run(["serve"]) == 0
    assert (seen.arrived["max_queue"], seen.arrived["names"]) == (1, ("file", "other"))
    assert seen.arrived["cors_origins"] == ("http://file",)
    assert seen.arrived["api_key"] is None
    monkeypatch.setenv("PACELINE_MAX_QUEUE", "2")
    monkeypatch.setenv("PACELINE_SERVED_MODEL_NAME", "variable")
    assert main.run(["serve"]) == 0
    assert (seen.arrived["max_queue"], seen.arrived["names"]) == (2, ("variable",))
    assert main.run(["serve", "--max-queue", "3", "--alias", "flag"]) == 0
    assert (seen.arrived["max_queue"], seen.arrived["names"]) == (3, ("flag",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "'prot', which is no flag; did you mean 'port'?"),
        ("config: x", "no flag"),
        ("- port", "is not a mapping"),
        ("port: [", "cannot read"),
        ("port: many", "Invalid value for '--port': Input should be a valid integer"),
        ("port: 70000", "less than or equal to 65535"),
    ],
)
def test_a_file_that_cannot_be_is_refused(
    text: str, words: str, seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert main.run(["serve", "--config", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_not_there(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["serve", "--config", "/no/such/file"]) == 2
    assert "cannot read /no/such/file" in capsys.readouterr().err
    assert main.run(["serve", "--chat-template", "/no/such/file"]) == 2


@pytest.mark.parametrize("model", ["smollm2", "org/name:Q4_0"])
def test_the_name_is_as_given(model: str, seen: Seen) -> None:
    assert main.run(["serve", model]) == 0
    assert seen.arrived["names"] == (model,)


def test_files_and_folders_are_called_by_their_last_name(seen: Seen, tmp_path: Path) -> None:
    assert main.run(["serve", "/models/some.file.gguf"]) == 0
    assert seen.arrived["names"] == ("some.file",)
    (tmp_path / "Qwen-1.5").mkdir()
    assert main.run(["serve", str(tmp_path / "Qwen-1.5")]) == 0
    assert seen.arrived["names"] == ("Qwen-1.5",)


def test_flags_of_loading_reach_the_model(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path, tmp_path: Path
) -> None:
    import paceline.engine

    def record(model: Any, **options: Any) -> Any:
        arrived.update(options)
        return model

    arrived: dict[str, Any] = {}
    monkeypatch.setattr(paceline.engine, "LLM", record)
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    arguments = [f"--{name.replace('_', '-')}={typed}" for name, (typed, _) in LOADING.items()]
    assert main.run(["serve", str(smollm2_path), "--chat-template", str(template), *arguments]) == 0
    _, metadata = seen.load()
    assert {name: arrived[name] for name in LOADING} == {name: value for name, (_, value) in LOADING.items()}
    assert metadata["tokenizer.chat_template"] == "{{ messages }}"


def test_the_page_names_every_flag_and_its_default() -> None:
    table = PAGE.partition("## Flags")[2].partition("## ")[0]
    rows: dict[tuple[str, ...], str] = {}
    for line in table.splitlines():
        if line.startswith("| `-"):
            names, default = line.split("|")[1:3]
            rows[tuple(re.findall(r"`([^`]+)`", names))] = default.strip().strip("`")
    options = [p for p in load_verb("serve").params if p.param_type_name == "option"]
    assert set(rows) == {tuple(p.opts) for p in options}
    for option in options:
        default = rows[tuple(option.opts)]
        if option.default not in (None, [], ()) and option.name != "speculate":
            assert default == str(option.default)


def test_no_other_verb_waits_for_the_web_framework() -> None:
    verbs = [verb for verb in main.VERBS if verb != "serve"]
    code = f"""
import sys
from paceline.cli.main import load_verb
for verb in {verbs}:
    load_verb(verb)
load_verb("serve")
print([name for name in ("fastapi", "uvicorn", "prometheus_client", "yaml") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@contextmanager
def served(model: Path, *arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The real program and its URL."""
    command = [sys.executable, "-m", "paceline", "serve", str(model), "--port", "0", *arguments]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}, start_new_session=True
    )
    try:
        assert process.stderr is not None
        url = next(m[1] for line in process.stderr if (m := re.search(r"(http://\S+);", line)))
        while httpx.get(url + "/health", timeout=60).status_code != 200:
            assert process.poll() is None
        yield process, url
    finally:
        process.kill()
        process.communicate()


def test_the_real_program_serves_and_drains(smollm2_path: Path) -> None:
    ask: Mapping[str, Any] = {
        "messages": [{"role": "user", "content": "Count from one to twenty."}],
        "temperature": 0,
        "max_tokens": 40,
    }
    with LLM(smollm2_path, max_model_len=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=40)
        expected = llm.generate(ask["messages"], params, speculate="off")
    with served(smollm2_path, "--ctx-size", "512", PACELINE_API_KEY="k") as (process, url):
        client = httpx.Client(base_url=url, timeout=120, headers={"Authorization": "Bearer k"})
        with client:
            answer = client.post("/v1/chat/completions", json=ask).json()
            assert answer["choices"][0]["message"]["content"] == expected.text
            assert answer["model"] == smollm2_path.stem
            with client.stream("POST", "/v1/chat/completions", json={**ask, "stream": True}) as stream:
                lines = stream.iter_lines()
                first = next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            events = [json.loads(line[6:]) for line in [first, *rest[:-1]]]
            assert rest[-1] == "data: [DONE]"
            text = "".join(c["delta"].get("content", "") for e in events for c in e["choices"])
            assert text == expected.text
        assert process.wait(60) == 0


def test_the_real_program_ends_at_the_second_interrupt(smollm2_path: Path) -> None:
    with served(smollm2_path) as (process, url):
        body = {"prompt": "a", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as stream:
            next(stream.iter_lines())
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert any("finishing what runs" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)  # two at once would count as one
            assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()


def test_what_keeps_it_from_starting_is_said(tmp_path: Path) -> None:
    def fails(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "serve", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "none.gguf does not exist" in fails(str(tmp_path / "none.gguf"), "--port", "0")
    assert "cannot listen on 192.0.2.1:0" in fails("smollm2", "--host", "192.0.2.1", "--port", "0")
    assert serve.DEMO_MODEL == "smollm2"
