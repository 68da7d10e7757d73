"""How grammars are compiled, and the process in which a grammar from outside is compiled first.

A schema or grammar comes with a request, so it may be hostile: it may explode, or nest until the stack
ends and take its process along. So `grammar` has it compiled here first, by path, imports nothing of ours.
What passes is known to be harmless and is compiled once more where it is used.

The first request is the vocabulary: {"size": n, "special": {id: text}, "ends": [ids]}. Each later one is
{"kind": ..., "source": ...}, and its reply {"grammar": text} or {"refused": why}.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CPU_SECONDS = 2.0
MEMORY_BYTES = 1 << 30
STACK_BYTES = 128 << 20
"""Virtual until used. Compiling takes about 8 KiB of stack for each level that a source can nest."""

STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, spaced as models are used to: nothing else to decide, so much of it is forced."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=60_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def grammar_text(kind: str, source: Any) -> str:
    """What a matcher is made from. Raises what llguidance does for a source that cannot be read at all."""
    if kind == "json_object":
        return str(LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=STYLE))
    if kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(source, defaults=STYLE))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(source))
    if kind == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in source)
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
    lark = any_to_lark(source) if kind == "grammar" else source
    return str(LLMatcher.grammar_from_lark(lark))


def matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile, on a stack deep enough, and work out what may come first. The result may be in error."""
    made: list[LLMatcher] = []

    def make() -> None:
        first = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if not first.is_error():
            first.compute_ff_tokens()
            first.compute_bitmask()
        made.append(first)

    with _stacks:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=make)
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return made[0]


_stacks = threading.Lock()


def reason(failed: LLMatcher) -> str:
    """Why a matcher is in error, on one line."""
    text = " ".join(str(failed.get_error()).replace("<non-verbose/>", "").split())
    if "NoExtension" in text:
        return "no text can match it"
    return text if len(text) <= 300 else f"{text[:300]}..."


class _Bytes:
    """A vocabulary of single bytes, with special tokens where the model has them."""

    bos_token_id = None

    def __init__(self, size: int, special: Mapping[str, str], ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        named = {int(token): text.encode() for token, text in special.items()}
        self.special_token_ids = list(named)
        self.tokens = [named.get(token, b"") for token in range(size)]
        free = (token for token in range(size) if token not in named)
        self._ids = [token for token, _ in zip(free, range(256), strict=False)]
        for byte, token in enumerate(self._ids):
            self.tokens[token] = bytes([byte])

    def __call__(self, text: str) -> list[int]:
        return [self._ids[byte] for byte in text.encode()]


def answer(tokenizer: LLTokenizer, kind: str, source: Any) -> dict[str, str]:
    try:
        grammar = grammar_text(kind, source)
    except RecursionError:
        return {"refused": "it nests too deeply"}
    except Exception as error:  # the converter of GBNF has errors of its own, and others
        return {"refused": " ".join(str(error).split())[:300]}
    made = matcher(tokenizer, grammar)
    return {"refused": reason(made)} if made.is_error() else {"grammar": grammar}


def _mapped_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def limit() -> None:
    """Give up, for good, what compiling has no use for. Where there is no such limit time still ends it."""
    for name, value in (
        (resource.RLIMIT_AS, _mapped_bytes() + STACK_BYTES + MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (value, value))


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    vocabulary = json.loads(sys.stdin.readline())
    size, special, ends = vocabulary["size"], vocabulary["special"], vocabulary["ends"]
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(size, special, ends)), eos_token=ends, slices=[])
    limit()
    for line in sys.stdin:
        request = json.loads(line)
        # The default action of SIGPROF ends the process: nothing in it has to cooperate.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = answer(tokenizer, request["kind"], request["source"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
