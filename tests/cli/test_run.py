"""`run` over the stub target: turns, commands, and every way to leave."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import run as verb
from paceline.cli.main import run
from paceline.cli.options import MachineFlags
from paceline.core import SamplingParams
from paceline.engine import LLM
from paceline.text.template import ChatTemplate
from support.stub_llm import stub_llm

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
Capture = pytest.CaptureFixture[str]


class Recorder:
    """The stub LLM, keeping what it was asked; may be interrupted in the middle of an answer."""

    def __init__(self, llm: LLM) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.interrupt_after: int | None = None
        self._llm = llm
        self.chat_template = llm.chat_template
        self.closed = False

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def stream(self, messages: list[dict[str, Any]], params: SamplingParams) -> Iterator[Any]:
        self.asked.append(messages)
        for count, chunk in enumerate(self._llm.stream(messages, params)):
            if count == self.interrupt_after:
                raise KeyboardInterrupt
            yield chunk


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    llm = stub_llm()
    llm.chat_template = ChatTemplate(TEMPLATE)
    recorder = Recorder(llm)

    def load(model: str, machine: MachineFlags, speculate: Any) -> tuple[Recorder, Path, float]:
        return recorder, Path(model), 0.1

    monkeypatch.setattr(verb, "load", load)
    yield recorder
    llm.chat_template.close()


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str, flags: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return run(["run", "stub", "-n", "8", *flags])


def test_a_conversation_keeps_its_turns(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert talk(monkeypatch, "one", "", "two", flags=("--system", "S")) == 0
    answers = capsys.readouterr().out.splitlines()
    first, second = recorder.asked
    assert first == [{"role": "system", "content": "S"}, {"role": "user", "content": "one"}]
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"]
    assert second[2]["content"] in "\n".join(answers)


def test_commands_and_their_misspellings(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    lines = ("/stats", "one", "/stats", "/rest", "/reset", "two", "/help", "/quit", "never")
    assert talk(monkeypatch, *lines) == 0
    out, err = capsys.readouterr()
    assert "nothing was answered yet" in err
    assert "tokens" in err
    assert "did you mean /reset?" in err
    assert all(name in err for name in verb.COMMANDS)
    assert [m["content"] for m in recorder.asked[1]] == ["two"]
    assert len(recorder.asked) == 2
    assert "/help" not in out


def test_the_end_of_input_leaves(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch) == 0
    assert recorder.asked == []
    assert recorder.closed


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    recorder.interrupt_after = 4
    assert talk(monkeypatch, "one", "two", "/quit") == 0
    assert "Ctrl-C again leaves" in capsys.readouterr().err
    assert [m["role"] for m in recorder.asked[1]] == ["user", "assistant", "user"]


def test_two_interrupts_in_a_row_leave_with_130(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "read_line", interrupted)
    assert run(["run", "stub"]) == 130


def test_a_line_between_interrupts_starts_the_count_again(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Iterator[str | None] = iter(["!", "/stats", "!", "/stats", None])

    def scripted() -> str | None:
        line = next(script)
        if line == "!":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(verb, "read_line", scripted)
    assert run(["run", "stub"]) == 0


def test_a_message_that_does_not_fit_is_said_and_forgotten(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert talk(monkeypatch, "x" * 600, "short") == 0
    assert "context limit is 512" in capsys.readouterr().err
    assert [m["content"] for m in recorder.asked[1]] == ["short"]


def test_a_model_without_a_template_is_refused(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    recorder.chat_template = None
    assert talk(monkeypatch, "one") == 1
    assert "has no chat template" in capsys.readouterr().err
