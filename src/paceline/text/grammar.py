"""Grammars that limit what a model may write: JSON, JSON Schema, regular expressions, choices, grammars.

The work is llguidance's. Here it gets the model's vocabulary byte for byte, sources from outside are
compiled within bounds, and what a grammar leaves no choice about becomes a run of tokens: the tokens that
spell it, worked out once and then both the mask and a draft.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from paceline.core import Mask
from paceline.errors import RequestError, ResourceError, suggest
from paceline.text import grammar_worker
from paceline.text.grammar_worker import STYLE
from paceline.text.tokenizer import Tokenizer
from paceline.text.worker import Worker, out_of_time

__all__ = [
    "STYLE",
    "GrammarConstraint",
    "Kind",
    "compile_constraint",
    "compile_tools",
    "prepare",
    "schema_text",
]

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

MAX_SOURCE_CHARS = 128 << 10
_MAX_CACHED = 16
_SCRIPT = Path(__file__).with_name("grammar_worker.py")
_SECONDS = 30.0
_NAMES: dict[str, tuple[str, str]] = {
    "json_object": ("JSON object", ""),
    "json_schema": ("JSON schema", "simplify it; docs/structured.md lists the keywords that are supported"),
    "regex": (
        "regular expression",
        "it is matched as a whole; look-around and back-references are not supported",
    ),
    "choice": ("list of choices", "give fewer or shorter ones"),
    "tools": ("description of the tools", "simplify their schemas; see docs/structured.md"),
    "grammar": ("grammar", "give Lark, as llguidance reads it, or llama.cpp's GBNF"),
}


def compile_constraint(kind: Kind, source: Any, tokenizer: Tokenizer) -> GrammarConstraint:
    """Compile what a request asks its text to be; equal ones are compiled once per tokenizer.

    Args:
        kind: "json_object" (any JSON object), "json_schema", "regex", "choice" or "grammar".
        source: nothing for json_object; a mapping, boolean or JSON text for json_schema; the expression;
            the list of texts; the grammar, as Lark or GBNF.
        tokenizer: of the model that is to write the text.

    Raises:
        RequestError: the source is malformed, asks for what is not supported, matches no text, or takes
            more time, memory or depth than a request may.
    """
    if kind not in get_args(Kind):
        raise RequestError(
            f"there is no constraint of kind {kind!r}", suggest(str(kind), list(get_args(Kind)))
        )
    return GrammarConstraint(_compiler(tokenizer).compile(kind, _checked(kind, source)))


def compile_tools(source: str, tokenizer: Tokenizer) -> GrammarConstraint:
    """Compile the grammar of calls whose arguments follow schemas from outside. Raises RequestError."""
    return GrammarConstraint(_compiler(tokenizer).compile("tools", _checked("tools", source)))


def prepare(tokenizer: Tokenizer) -> None:
    """Do now what the first constraint would otherwise wait for: a second for a large vocabulary."""
    _compiler(tokenizer).start()


class GrammarConstraint:
    """How far one text has come in a grammar. Implements `core.Constraint`.

    Where only one text can follow, that text as the model's tokenizer spells it is a *run*: one token after
    the other is the only one allowed, until the run ends or other tokens that spell it are possible again.
    A finished text allows the model's end token alone.
    """

    def __init__(self, compiled: _Compiled) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher()
        self._run: list[int] | None = None  # None: not worked out yet
        self._mask: Mask | None = None
        self._ended = False

    @property
    def stopped(self) -> bool:
        return self._ended or bool(self._matcher.is_stopped())

    def mask(self) -> Mask:
        if self._mask is None:
            self._mask = self._work_out()
        return self._mask

    def advance(self, token: int) -> None:
        if self._ended:
            return
        # A text that is written again must meet the same runs, also where nobody asked for a mask.
        run = self._forced()
        self._mask = None
        self._run = run[1:] or None if run and run[0] == token else None
        if token in self._compiled.ends and self._matcher.is_accepting():
            self._ended = True
        elif not self._matcher.consume_token(token):
            raise self._failed()

    def accepts(self, tokens: Sequence[int]) -> int:
        run = self._forced()
        for i, (forced, token) in enumerate(zip(run, tokens, strict=False)):
            if forced != token:
                return i
        return len(tokens) if len(tokens) <= len(run) else int(self._matcher.validate_tokens(list(tokens)))

    def forced(self) -> list[int]:
        return list(self._forced())

    def fresh(self) -> GrammarConstraint:
        return GrammarConstraint(self._compiled)

    def _forced(self) -> list[int]:
        if self._run is None:
            self._run = self._find_run()
        return self._run

    def _find_run(self) -> list[int]:
        if self.stopped:
            return [self._compiled.end]
        run = list(self._matcher.compute_ff_tokens())
        if run:
            ahead = self._matcher.deep_copy()
            if ahead.try_consume_tokens(run) == len(run) and ahead.is_stopped() and not ahead.is_error():
                run.append(self._compiled.end)
        return run

    def _work_out(self) -> Mask:
        if run := self._forced():
            mask = np.zeros(self._compiled.words, np.uint32)
            mask[run[0] // 32] = np.uint32(1 << run[0] % 32)
            return mask
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._failed()
        return np.frombuffer(bits, np.uint32)

    def _failed(self) -> RequestError:
        name, _ = _NAMES[self._compiled.kind]
        return RequestError(
            f"the {name} cannot be followed any further: {grammar_worker.reason(self._matcher)}",
            "simplify it: fewer alternatives at one place, shorter repetitions",
        )


class _Compiled:
    """One grammar, compiled: hands out matchers that stand at its start."""

    def __init__(self, kind: str, prototype: LLMatcher, vocabulary: _Vocabulary) -> None:
        self.kind = kind
        self.end = vocabulary.end
        self.ends = vocabulary.ends
        self.words = vocabulary.words
        self._prototype = prototype
        self._lock = threading.Lock()

    def matcher(self) -> LLMatcher:
        with self._lock:
            return self._prototype.deep_copy()


class _Vocabulary:
    """A tokenizer as llguidance wants to see it: bytes, and special tokens that no text can produce."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in ids]
        self.special_token_ids = [token for token in ids if tokenizer.is_special(token)]
        self.ends = tokenizer.eog_ids
        if not self.ends:
            raise RequestError("this model has no token that ends a text", "leave out the constraint")
        self.end = tokenizer.eos_id if tokenizer.eos_id in self.ends else min(self.ends)
        self.eos_token_id = self.end
        self.bos_token_id = tokenizer.bos_id
        self.words = -(-tokenizer.vocab_size // 32)
        self._tokenizer = weakref.proxy(tokenizer)

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special=False, continuing=True)
        return ids

    def describe(self) -> str:
        """What the worker must know of it, as JSON text."""
        special = {token: self.tokens[token].decode("utf-8", "replace") for token in self.special_token_ids}
        return json.dumps({"size": len(self.tokens), "special": special, "ends": sorted(self.ends)})


class _Compiler:
    """Compiles for one tokenizer, first in a process where it can do no harm, and keeps the latest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = _Vocabulary(tokenizer)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(self._vocabulary), eos_token=sorted(self._vocabulary.ends)
        )
        self._worker = Worker(_SCRIPT, "grammar")
        self._cache: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            self._running()

    def compile(self, kind: str, source: Any) -> _Compiled:
        key = kind, json.dumps(source)
        with self._lock:
            if (found := self._cache.get(key)) is None:
                found = self._cache[key] = self._make(kind, source)
                if len(self._cache) > _MAX_CACHED:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(key)
            return found

    def _make(self, kind: str, source: Any) -> _Compiled:
        # Any JSON object is no source from outside.
        grammar = (
            grammar_worker.grammar_text(kind, source) if kind == "json_object" else self._try(kind, source)
        )
        prototype = grammar_worker.matcher(self._tokenizer, grammar)
        if prototype.is_error():
            raise _refused(kind, grammar_worker.reason(prototype))
        return _Compiled(kind, prototype, self._vocabulary)

    def _try(self, kind: str, source: Any) -> str:
        """Compile in the worker; returns what llguidance calls the grammar."""
        self._running()
        self._worker.send(json.dumps({"kind": kind, "source": source}))
        reply = self._worker.receive(_SECONDS)
        if isinstance(reply, dict):
            if "refused" in reply:
                raise _refused(kind, reply["refused"])
            return reply["grammar"]
        if reply == 1:
            raise ResourceError("the grammar process does not start", "check that llguidance is installed")
        if out_of_time(reply):
            raise _refused(kind, f"it takes more than {grammar_worker.CPU_SECONDS:g} seconds to compile")
        raise _refused(kind, "compiling it takes too much memory or nests too deeply")

    def _running(self) -> None:
        if self._worker.start():
            self._worker.send(self._vocabulary.describe())


_compilers: weakref.WeakKeyDictionary[Tokenizer, _Compiler] = weakref.WeakKeyDictionary()
_compilers_lock = threading.Lock()


def _compiler(tokenizer: Tokenizer) -> _Compiler:
    with _compilers_lock:
        if (found := _compilers.get(tokenizer)) is None:
            found = _compilers[tokenizer] = _Compiler(tokenizer)
        return found


def _refused(kind: str, why: str) -> RequestError:
    name, hint = _NAMES[kind]
    return RequestError(f"the {name} cannot be used: {why}", hint)


def _checked(kind: str, source: Any) -> Any:
    """The source, of the right type and size, as JSON can carry it."""
    name, _ = _NAMES[kind]
    if kind == "json_object":
        return None
    if kind == "choice":
        source = _choices(source)
    elif kind == "json_schema":
        source = schema_text(source)
    elif not isinstance(source, str):
        raise RequestError(f"the {name} is of type {type(source).__name__}", "give a string")
    size = len(source) if isinstance(source, str) else sum(map(len, source))
    if not size:
        raise RequestError(f"the {name} is empty", "give one, or leave out the constraint")
    if size > MAX_SOURCE_CHARS:
        raise RequestError(f"the {name} has {size} characters, more than {MAX_SOURCE_CHARS}", "shorten it")
    return source


def _choices(source: Any) -> list[str]:
    if isinstance(source, str | bytes) or not isinstance(source, Sequence):
        raise RequestError(f"the choices are {type(source).__name__}", "give a list of strings")
    for text in source:
        if not isinstance(text, str) or not text:
            raise RequestError(f"the choices hold {text!r}", "give strings that are not empty")
    return list(dict.fromkeys(source))


def schema_text(source: Any) -> str:
    """A schema, given as it is or as JSON text, as JSON text of an object. Raises RequestError."""
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except RecursionError:
            raise RequestError("the JSON schema nests too deeply", "simplify it") from None
        except ValueError as error:
            raise RequestError(f"the JSON schema is not valid JSON: {error}", "check its syntax") from None
    if source is True:
        source = {}
    if not isinstance(source, Mapping):
        raise RequestError(f"the JSON schema is {json.dumps(source)[:80]}", "give an object")
    try:
        return json.dumps(source, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema holds what JSON cannot: {error}", "check its values") from None
