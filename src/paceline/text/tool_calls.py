"""Calls of tools in what a model writes: found while the text arrives, or enforced.

Two ways of writing them cover most models. Hermes and Qwen write
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, Llama 3 writes
`{"name": ..., "parameters": {...}}` on a line of its own, sometimes after `<|python_tag|>`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from paceline.errors import RequestError, suggest
from paceline.text.grammar import STYLE, GrammarConstraint, compile_tools, schema_text
from paceline.text.json_scan import JsonScanner
from paceline.text.tokenizer import Tokenizer

Format = Literal["hermes", "llama3"]


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a model writes a call.

    Attributes:
        opening: what announces one.
        closing: what follows it, perhaps.
        arguments: key of the arguments when we write it.
        bare: a call may also begin without the announcement, at the start of a line.
    """

    opening: str
    closing: str
    arguments: str
    bare: bool


_SHAPES: dict[Format, _Shape] = {
    "hermes": _Shape("<tool_call>", "</tool_call>", "arguments", False),
    "llama3": _Shape("<|python_tag|>", ";", "parameters", True),
}
_BRACE = re.compile(r"^[^\S\n]*\{", re.MULTILINE)
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", *_ARGUMENTS, "type", "id"})


def detect(chat_template: str | None) -> Format | None:
    """How a model with this chat template writes calls; None if it is neither way, or unknown."""
    template = chat_template or ""
    if "<tool_call>" in template:
        return None if "<function=" in template else "hermes"
    if "<|python_tag|>" in template or '"parameters": dictionary of' in template:
        return "llama3"
    return None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call, as OpenAI streams them.

    Attributes:
        index: which call of the answer.
        id, name: in the call's first piece only.
        arguments: JSON text to append to what came before.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


class Parsed(NamedTuple):
    """What is new: text for the reader, and pieces of calls."""

    content: str
    calls: list[ToolCallDelta]


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Parts one answer into text and calls while it arrives.

    However the text is cut into pushes, the joined content and the joined calls are the same. What only
    looked like a call comes out as content, whole. Arguments are handed on as the model writes them; a call
    that goes wrong in the middle of them stays as far as it came, and the rest is content. White space
    around calls is dropped.

    Args:
        form: how the model writes calls.
        tools: names of the functions there are. A bare call of any other name is content.

    Attributes:
        count: calls so far, the present one not included.
    """

    def __init__(
        self, form: Format, tools: Collection[str] = (), *, new_id: Callable[[], str] = _new_id
    ) -> None:
        self._shape = _SHAPES[form]
        self._tools = frozenset(tools)
        self._new_id = new_id
        self._held = ""  # text whose meaning depends on what follows
        self._line = ""  # content of the present line so far
        self._call: _Call | None = None
        self._lead = ""  # what was dropped before the present call
        self._closing = False  # a call has ended, and its closing has not come
        self._content: list[str] = []
        self._pieces: list[ToolCallDelta] = []
        self.count = 0

    def push(self, text: str) -> Parsed:
        """Take more of the answer."""
        self._held += text
        while self._held and (self._in_call() if self._call else self._in_text()):
            pass
        return self._take()

    def finish(self) -> Parsed:
        """The answer is over; returns what was held back."""
        if self._call is not None:
            self._end(self._call)
        cut = self._closing and self._shape.closing.startswith(self._held.strip())
        if not cut and (self._held.strip() or not self.count):
            self._say(self._held)
        self._held = ""
        return self._take()

    def _take(self) -> Parsed:
        parsed = Parsed("".join(self._content), _joined(self._pieces))
        self._content, self._pieces = [], []
        return parsed

    def _in_text(self) -> bool:
        """Go on to the next call. False when more text is needed to tell."""
        if self._closing:
            return self._in_closing()
        at, length = self._find_call()
        if at is not None:
            body = self._held[:at].rstrip()
            self._say(body)
            self._lead = self._held[len(body) : at + length]
            self._held = self._held[at + length :]
            self._call = _Call(self._tools, strict=self._shape.bare)
            return True
        keep = self._uncertain()
        self._say(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _find_call(self) -> tuple[int | None, int]:
        """(where the next call is announced, length of the announcement)."""
        opening = self._shape.opening
        found = self._held.find(opening)
        if self._shape.bare and (bare := self._find_brace()) is not None and not -1 < found < bare:
            return bare, 0
        return (None, 0) if found < 0 else (found, len(opening))

    def _find_brace(self) -> int | None:
        """The first brace with nothing but white space before it on its line."""
        for match in _BRACE.finditer(self._held):
            if match.start() or not self._line.strip():
                return match.end() - 1
        return None

    def _uncertain(self) -> int:
        """How much of the end may still belong to a call: part of an announcement, white space before it."""
        opening, held = self._shape.opening, self._held
        for length in range(min(len(opening) - 1, len(held)), 0, -1):
            if held.endswith(opening[:length]):
                return len(held) - len(held[:-length].rstrip())
        return len(held) - len(held.rstrip())

    def _say(self, text: str) -> None:
        if text:
            self._content.append(text)
            _, broken, line = text.rpartition("\n")
            self._line = line if broken else self._line + line

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        self._held = self._held[call.feed(self._held) :]
        if call.begun and not call.announced:
            call.announced = True
            self._pieces.append(ToolCallDelta(self.count, self._new_id(), call.name, ""))
        if arguments := call.take():
            self._pieces.append(ToolCallDelta(self.count, None, None, arguments))
        if not (call.done or call.failed):
            return False
        self._closing = call.done
        self._end(call)
        return True

    def _end(self, call: _Call) -> None:
        """Leave a call; what did not become one is content, all of it."""
        if call.begun:
            self.count += 1
            self._line = ""
        else:
            self._say(self._lead + call.text)
        self._call = None

    def _in_closing(self) -> bool:
        """Drop what follows a call. False when more text is needed to tell."""
        held, closing = self._held.lstrip(), self._shape.closing
        if closing.startswith(held) and held != closing:
            return False
        if held.startswith(closing):
            self._held = held[len(closing) :]
        self._closing = False
        return True


class _Call:
    """One call as it is being written: the JSON object alone.

    Attributes:
        text: all of it that was taken.
        begun: enough is known to tell the caller about it.
        done: the object is complete, and it is a call.
        failed: it is not, or no longer, a call.
    """

    def __init__(self, tools: frozenset[str], *, strict: bool) -> None:
        self.text = ""
        self.name = ""
        self.begun = self.done = self.failed = self.announced = False
        self._tools = tools
        self._strict = strict
        self._scanner = JsonScanner()
        self._key = ""
        self._mark = 0  # where the present key or value begins
        self._from: int | None = None  # where the arguments go on that are to be handed on
        self._early = ""  # arguments that came before the name
        self._arguments: list[str] = []

    def take(self) -> str:
        """Arguments since the last call of this."""
        taken = "".join(self._arguments)
        self._arguments = []
        return taken

    def feed(self, text: str) -> int:
        """Take as much of `text` as belongs to it; returns how many characters that is."""
        start = at = len(self.text)
        self.text += text
        scanner = self._scanner
        while at < len(self.text) and not (self.done or self.failed):
            char, before, depth = self.text[at], scanner.expects, scanner.depth
            if not scanner.feed(char) or not (depth or char == "{" or char.isspace()):
                self.failed = True
                break
            at += 1
            if depth <= 1 or scanner.depth <= 1:
                self._follow(char, before, depth, at)
        self.text = self.text[:at]
        if self._from is not None:
            self._arguments.append(self.text[self._from :])
            self._from = at
        return at - start

    def _follow(self, char: str, before: str, depth: int, end: int) -> None:
        """Notice where keys and values of the object itself begin and end; `char` ended at `end`."""
        scanner = self._scanner
        if scanner.expects == "nothing":
            self._complete(end)
        elif depth == 1 and before == "string":
            text = self.text[self._mark : end]
            if scanner.expects == "colon":
                self._key = json.loads(text)
                self.failed = self._strict and self._key not in _KEYS
            elif scanner.expects == "comma" and self._key == "name":
                self.name = json.loads(text)
                self.failed = self._unknown()
        elif depth == 1 and scanner.expects == "string":
            self._mark = end - 1
        elif depth == 1 and char == "{" and self._key in _ARGUMENTS and not self.begun:
            self._mark = end - 1
            if self.name:
                self.begun = True
                self._from = end - 1
        elif depth == 2 and self._from is not None:
            self._arguments.append(self.text[self._from : end])
            self._from = None
        elif depth == 2 and char == "}" and self._key in _ARGUMENTS:
            self._early = self.text[self._mark : end]

    def _unknown(self) -> bool:
        return not self.name or (self._strict and bool(self._tools) and self.name not in self._tools)

    def _complete(self, end: int) -> None:
        """The object has ended: what was not handed on while it came is now."""
        if not self.begun:
            arguments = self._whole(self.text[:end])
            if arguments is None:
                self.failed = True
                return
            self.begun = True
            self._arguments.append(arguments)
        self.done = True

    def _whole(self, text: str) -> str | None:
        """The arguments as JSON text, from a complete object; None if it is no call."""
        try:
            found = json.loads(text)
            key = next((key for key in _ARGUMENTS if key in found), None)
            arguments = found.get(key)
            if isinstance(arguments, str):  # JSON within JSON, as the API itself has it
                arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        self.name = found.get("name")
        if not isinstance(self.name, str) or self._unknown() or (key is None and self._strict):
            return None
        if not isinstance(arguments, dict | None):
            return None
        return self._early or json.dumps(arguments or {}, ensure_ascii=False)


def _joined(pieces: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """Neighbouring pieces of one call, as one."""
    joined: list[ToolCallDelta] = []
    for piece in pieces:
        if joined and joined[-1].index == piece.index and piece.id is None:
            joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + piece.arguments)
        else:
            joined.append(piece)
    return joined


def force_calls(
    choice: str | Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    form: Format,
    tokenizer: Tokenizer,
    *,
    parallel: bool = True,
) -> GrammarConstraint | None:
    """What `tool_choice` makes of an answer: None where the model decides, else calls and nothing but.

    The arguments follow the functions' schemas.

    Args:
        choice: "none", "auto", "required", or {"type": "function", "function": {"name": ...}}.
        tools: as OpenAI describes them: {"type": "function", "function": {"name", "parameters"}}.
        form: how the model writes calls.
        parallel: whether "required" may be several calls. A named function is called once.

    Raises:
        RequestError: the choice names no tool, or a tool is malformed or its schema cannot be followed.
    """
    if choice in ("none", "auto"):
        return None
    functions = _functions(tools)
    if choice != "required":
        name = _named(choice, list(functions))
        functions, parallel = {name: functions[name]}, False
    if not functions:
        raise RequestError('tool_choice is "required", and there are no tools', "give tools")
    return compile_tools(_grammar(functions, _SHAPES[form], parallel and form == "hermes"), tokenizer)


def _grammar(functions: Mapping[str, str], shape: _Shape, parallel: bool) -> str:
    """Lark for one call or several."""
    opening, closing = ("", "") if shape.bare else (f"{shape.opening}\n", f"\n{shape.closing}")
    names = [f"call_{i}" for i in range(len(functions))]
    several = r' ("\n" call)*' if parallel else ""
    lines = [f"start: call{several}", f"call: {' | '.join(names)}"]
    for i, (name, schema) in enumerate(functions.items()):
        head = json.dumps(f'{opening}{{"name": "{name}", "{shape.arguments}": ')
        lines.append(f"call_{i}: {head} arguments_{i} {json.dumps('}' + closing)}")
        lines.append(f"arguments_{i}: %json {schema}")
    return "\n".join(lines)


_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name and schema of the arguments, as JSON text, of each tool."""
    functions: dict[str, str] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(
                f"tools[{i}].function.name is {name!r}", "give 1 to 64 letters, digits, '_', '-' and '.'"
            )
        if name in functions:
            raise RequestError(f"two tools are called {name!r}", "give each a name of its own")
        assert isinstance(function, Mapping)
        functions[name] = _schema(f"tools[{i}].function.parameters", function.get("parameters"))
    return functions


def _schema(where: str, schema: object) -> str:
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise RequestError(f"{where} is no schema of an object", 'give one with "type": "object"')
    own = schema.get("x-guidance", {})
    style = {**STYLE, **own} if isinstance(own, Mapping) else own
    return schema_text({"type": "object", **schema, "x-guidance": style})


def _named(choice: str | Mapping[str, Any], known: list[str]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {choice!r}",
            'use "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
        )
    if name not in known:
        raise RequestError(f"tool_choice names {name!r}, which is not among the tools", suggest(name, known))
    return name
