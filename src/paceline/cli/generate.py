"""`paceline generate MODEL [PROMPT]`: one prompt in, one text out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.loading import load
from paceline.cli.options import MODEL_VARIABLE, EngineFlags, SamplingFlags
from paceline.cli.summary import as_object, in_words
from paceline.cli.verb import verb
from paceline.core import Completion, SamplingParams
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.engine import LLM


@verb
def command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL [PROMPT]", help="Without PROMPT: --file, else stdin")
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="The model; the only argument is then the prompt", allow_from_autoenv=False
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from this file")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the model's chat template; default: if the file has one"),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message, with a chat template")
    ] = None,
    prediction: Annotated[
        Path | None, typer.Option("--prediction", help="File with text that the answer will resemble")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Independent answers; answer i uses seed + i")] = 1,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Likeliest alternatives per token")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one object per answer")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary on stderr")] = False,
    sampling: SamplingFlags,
    engine: EngineFlags,
) -> None:
    params = sampling.params(n=n, logprobs=logprobs)
    if logprobs is not None and not json:
        raise UsageError("--logprobs shows nothing without --json", "add --json")
    name, prompt = _inputs(arguments or [], model, file)
    expected = None if prediction is None else read_text(prediction, "--prediction")
    llm, _, load_s = load(name, engine, engine.speculation())
    with llm:
        asked = _asked(llm, prompt, chat, system)
        answers = _answers(llm, asked, params, expected, show=not json)
    for answer in answers:
        if json:
            terminal.write_json(as_object(answer, name, load_s), indent=None if n > 1 else 2)
        if not quiet:
            terminal.note(in_words(answer))


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 file. Raises UsageError when it cannot be."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {what} {path}: {error}", "give a readable file in UTF-8") from None


def _inputs(arguments: list[str], model: str | None, file: Path | None) -> tuple[str, str]:
    """Which model, which prompt."""
    rest = list(arguments)
    if model is None and len(rest) < 2:
        model = os.environ.get(MODEL_VARIABLE)
    name = model if model is not None else rest.pop(0) if rest else None
    if name is None:
        raise UsageError(
            "no model was given", "write `paceline generate MODEL PROMPT`; smollm2 is one to try"
        )
    if len(rest) > 1:
        raise UsageError(f"unexpected argument {rest[1]!r}", "quote the prompt, so that it is one argument")
    if rest and file is not None:
        raise UsageError("a prompt and --file were both given", "give one of them")
    if rest and rest[0] != "-":
        return name, _sound(rest[0])
    if file is not None:
        return name, read_text(file, "--file").removesuffix("\n")
    if not rest and sys.stdin.isatty():
        raise UsageError("no prompt was given", "write it behind the model, or use --file, or pipe it in")
    try:
        return name, sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8: {error}", "convert it first") from None


def _sound(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("the prompt is not UTF-8", "check the terminal's locale, or use --file") from None
    return text


def _asked(llm: LLM, prompt: str, chat: bool | None, system: str | None) -> str | list[dict[str, Any]]:
    """Text for the model as it stands, or messages for its template."""
    has_template = llm.chat_template is not None
    if chat and not has_template:
        raise UsageError("--chat was given, but the file has no chat template", "use --raw")
    if not (has_template if chat is None else chat):
        if system is not None:
            raise UsageError("--system needs a chat template", "put it into the prompt, or use --chat")
        return prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": prompt}]


def _answers(
    llm: LLM, asked: Any, params: SamplingParams, prediction: str | None, *, show: bool
) -> list[Completion]:
    """Generate; a single text is shown as it grows, several are shown in order when all are there."""
    answers: dict[int, Completion] = {}
    for chunk in llm.stream(asked, params, prediction=prediction):
        if show and params.n == 1:
            terminal.write(chunk.text)
        if chunk.completion is not None:
            answers[chunk.index] = chunk.completion
    ordered = [answers[index] for index in sorted(answers)]
    if show:
        terminal.write("\n" if params.n == 1 else "".join(f"{answer.text}\n" for answer in ordered))
    return ordered
