"""`paceline run [MODEL]`: a conversation in the terminal."""

from __future__ import annotations

import difflib
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.loading import load
from paceline.cli.options import DEMO_MODEL, EngineFlags, Model, SamplingFlags
from paceline.cli.summary import in_words
from paceline.cli.verb import verb
from paceline.core import Completion, SamplingParams
from paceline.errors import PacelineError, UnsupportedModelError

if TYPE_CHECKING:
    from paceline.engine import LLM

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/stats": "what the last answer cost, and what speculation did",
    "/quit": "leave; so does Ctrl-D",
}


@verb
def command(
    model: Model = DEMO_MODEL,
    *,
    system: Annotated[str | None, typer.Option("--system", help="System message")] = None,
    sampling: SamplingFlags,
    engine: EngineFlags,
) -> int:
    params = sampling.params()
    llm, path, load_s = load(model, engine, engine.speculation())
    if llm.chat_template is None:
        raise UnsupportedModelError(f"{path.name} has no chat template", "use `paceline generate --raw`")
    terminal.note(f"{path.name}, loaded in {load_s:.1f} s. /help lists commands, Ctrl-C stops an answer.")
    with llm:
        return Conversation(llm, params, system).talk()


class Conversation:
    """Lines in, answers out, until /quit, the end of input or a second Ctrl-C in a row."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self._messages: list[dict[str, Any]] = list(self._start)
        self._last: Completion | None = None

    def talk(self) -> int:
        """Return the exit code."""
        interrupts = 0
        while True:
            try:
                line = read_line()
                if line is None or line.strip() in ("/quit", "/exit", "/bye"):
                    return 0
                interrupts = 0
                if line.strip():
                    self._take(line)
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts > 1:
                    raise
                terminal.note("\nstopped; Ctrl-C again leaves")

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            self._obey(line.strip())
            return
        try:
            self._answer(line)
        except PacelineError as error:
            terminal.note(f"error: {error.message}\nhint: {error.hint or '/reset starts over'}")

    def _answer(self, line: str) -> None:
        asked = [*self._messages, {"role": "user", "content": line}]
        said: list[str] = []
        try:
            with closing(self._llm.stream(asked, self._params)) as chunks:
                for chunk in chunks:
                    said.append(chunk.text)
                    terminal.write(chunk.text)
                    self._last = chunk.completion or self._last
            terminal.write("\n")
        finally:
            # An answer that was stopped half-way is part of the conversation; one that never began is not.
            if any(said):
                self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _obey(self, word: str) -> None:
        match word:
            case "/help":
                terminal.note("\n".join(f"{name:<8} {text}" for name, text in COMMANDS.items()))
            case "/reset":
                self._messages = list(self._start)
                terminal.note("forgotten")
            case "/stats":
                terminal.note(in_words(self._last) if self._last else "nothing was answered yet")
            case _:
                near = difflib.get_close_matches(word, COMMANDS, n=1)
                terminal.note(
                    f"no such command {word}; " + (f"did you mean {near[0]}?" if near else "try /help")
                )


def read_line() -> str | None:
    """One line from the user, None at the end of input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    import readline  # noqa: F401  - gives input() its editing keys

    if not sys.stdout.isatty():  # the prompt must not get into the data
        sys.stderr.write("> ")
        sys.stderr.flush()
    try:
        return input("> " if sys.stdout.isatty() else "")
    except EOFError:
        terminal.note("")
        return None
