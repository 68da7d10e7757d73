"""What tests of constrained text need: a small vocabulary with tokens across JSON's seams, schemas, walks."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core import Constraint, Mask
from paceline.text.tokenizer import Tokenizer
from support.tiny_tokenizer import ALPHABET, spell

_WORDS = (
    '{"',
    '": ',
    '": "',
    '", "',
    '"}',
    '"}]',
    ", ",
    " true",
    "true",
    "false",
    "null",
    "na",
    "name",
    "12",
    "0.",
)
_CONTROL = ("<s>", "</s>", "<|end|>", "<|other|>")


@cache
def json_tokenizer() -> Tokenizer:
    """Bytes, words that are spelled by merging from the left, and four control tokens of which two end."""
    tokens = [ALPHABET[byte] for byte in range(256)]
    merges = []
    for word in _WORDS:
        spelled = spell(word.encode())
        for i in range(1, len(spelled)):
            if spelled[: i + 1] not in tokens:
                tokens.append(spelled[: i + 1])
                merges.append(f"{spelled[:i]} {spelled[i]}")
    tokens += _CONTROL
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * (len(tokens) - len(_CONTROL)) + [3] * len(_CONTROL),
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
            "tokenizer.ggml.eot_token_id": tokens.index("<|end|>"),
        }
    )


def allowed(mask: Mask | None, size: int) -> NDArray[np.bool_]:
    """[size] the mask, id by id."""
    if mask is None:
        return np.ones(size, np.bool_)
    ids = np.arange(size)
    words = np.append(mask, np.uint32(0))[np.minimum(ids // 32, len(mask))]
    return (words >> (ids % 32).astype(np.uint32) & 1).astype(np.bool_)


def choices(constraint: Constraint, tokenizer: Tokenizer) -> list[int]:
    return np.flatnonzero(allowed(constraint.mask(), tokenizer.vocab_size)).tolist()


def wander(
    constraint: Constraint, tokenizer: Tokenizer, rng: random.Random, steps: int = 4000
) -> tuple[list[int], bool]:
    """Follow the constraint at random; (tokens without the end, whether it came to one)."""
    tokens: list[int] = []
    for _ in range(steps):
        token = rng.choice(choices(constraint, tokenizer))
        constraint.advance(token)
        if token in tokenizer.eog_ids:
            return tokens, True
        tokens.append(token)
    return tokens, False


def spell_out(constraint: Constraint, tokenizer: Tokenizer, text: str) -> list[int] | None:
    """The tokens by which a constraint lets exactly `text` be written; None if it does not."""
    left = text.encode()
    tokens: list[int] = []
    while left:
        fitting = [
            token
            for token in choices(constraint, tokenizer)
            if not tokenizer.is_special(token) and left.startswith(tokenizer.token_bytes(token))
        ]
        if not fitting:
            return None
        tokens.append(max(fitting, key=lambda token: len(tokenizer.token_bytes(token))))
        left = left[len(tokenizer.token_bytes(tokens[-1])) :]
        constraint.advance(tokens[-1])
    ends = tokenizer.eog_ids & set(choices(constraint, tokenizer))
    return tokens if ends else None


class RandomSchema:
    """A random schema and random values that are valid under it, both small enough to be written out."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.schema = self._any(3)

    def value(self) -> Any:
        return self._value(self.schema)

    def _any(self, depth: int) -> dict[str, Any]:
        kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
        if depth:
            kinds += ["object", "object", "array", "tuple", "anyOf", "several"]
        kind = self.rng.choice(kinds)
        made: dict[str, Any] = getattr(self, f"_{kind}", self._typed)(kind, depth)
        if self.rng.random() < 0.2:
            made["description"] = "d"
        return made

    def _typed(self, kind: str, depth: int) -> dict[str, Any]:
        return {"type": kind}

    def _string(self, kind: str, depth: int) -> dict[str, Any]:
        least = self.rng.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + self.rng.randrange(4)}

    def _integer(self, kind: str, depth: int) -> dict[str, Any]:
        least = self.rng.randrange(-1000, 1000)
        return {"type": "integer", "minimum": least, "maximum": least + self.rng.randrange(200)}

    def _number(self, kind: str, depth: int) -> dict[str, Any]:
        # Without an upper bound on digits a random walk among them takes long.
        return {"type": "number", "minimum": 0, "maximum": self.rng.randrange(1, 50)}

    def _enum(self, kind: str, depth: int) -> dict[str, Any]:
        pool = ["red", "green", 'a"b', "é\n", "", 0, -1.5, None, True, {"k": [1]}]
        return {"enum": self.rng.sample(pool, self.rng.randrange(1, 5))}

    def _const(self, kind: str, depth: int) -> dict[str, Any]:
        return {"const": self.rng.choice(["x", 12, None, ["a", {"b": False}]])}

    def _pattern(self, kind: str, depth: int) -> dict[str, Any]:
        return {"type": "string", "pattern": "^[a-c]{1,3}-(x|yz)?$"}

    def _format(self, kind: str, depth: int) -> dict[str, Any]:
        return {"type": "string", "format": self.rng.choice(["date", "uuid", "ipv4"])}

    def _object(self, kind: str, depth: int) -> dict[str, Any]:
        names = self.rng.sample(["name", "n", "a b", "é", 'q"', "zeta"], self.rng.randrange(4))
        return {
            "type": "object",
            "properties": {name: self._any(depth - 1) for name in names},
            "required": [name for name in names if self.rng.random() < 0.7],
            "additionalProperties": False,
        }

    def _array(self, kind: str, depth: int) -> dict[str, Any]:
        least = self.rng.randrange(2)
        return {
            "type": "array",
            "items": self._any(depth - 1),
            "minItems": least,
            "maxItems": least + self.rng.randrange(3),
        }

    def _tuple(self, kind: str, depth: int) -> dict[str, Any]:
        parts = [self._any(depth - 1) for _ in range(self.rng.randrange(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _anyOf(self, kind: str, depth: int) -> dict[str, Any]:  # noqa: N802 (the keyword's name)
        return {"anyOf": [self._any(depth - 1) for _ in range(2)]}

    def _several(self, kind: str, depth: int) -> dict[str, Any]:
        return {"type": ["boolean", "null"]}

    def _value(self, schema: dict[str, Any]) -> Any:
        rng = self.rng
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "anyOf" in schema:
            return self._value(rng.choice(schema["anyOf"]))
        if "pattern" in schema:
            return rng.choice(["a-", "abc-x", "cc-yz"])
        if "format" in schema:
            known = {
                "date": "2024-02-29",
                "uuid": "123e4567-e89b-12d3-a456-426614174000",
                "ipv4": "10.0.255.1",
            }
            return known[schema["format"]]
        match schema["type"]:
            case "object":
                names = [n for n in schema["properties"] if n in schema["required"] or rng.random() < 0.5]
                return {name: self._value(schema["properties"][name]) for name in names}
            case "array" if "prefixItems" in schema:
                return [self._value(part) for part in schema["prefixItems"]]
            case "array":
                count = rng.randint(schema["minItems"], schema["maxItems"])
                return [self._value(schema["items"]) for _ in range(count)]
            case "string":
                length = rng.randint(schema["minLength"], schema["maxLength"])
                return "".join(rng.choice('ab {}"\\\n/é😀') for _ in range(length))
            case "integer":
                return rng.randint(schema["minimum"], schema["maximum"])
            case "number":
                return rng.choice([0, 0.5, schema["maximum"], 0.125])
            case "boolean":
                return rng.choice([True, False])
            case "null":
                return None
            case _:
                return rng.choice([True, False, None])


class Listed:
    """A constraint written out: the ids allowed at each step, for tests of those who ask a constraint.

    Past the list everything is allowed.
    """

    def __init__(
        self, steps: list[list[int] | None], vocab_size: int, ends: frozenset[int] = frozenset()
    ) -> None:
        self.steps = steps
        self.vocab_size = vocab_size
        self.ends = ends
        self.at = 0

    @property
    def stopped(self) -> bool:
        now = self._now(self.at)
        return now is not None and set(now) <= self.ends

    def mask(self) -> Mask | None:
        now = self._now(self.at)
        if now is None:
            return None
        mask = np.zeros(-(-self.vocab_size // 32), np.uint32)
        for token in now:
            mask[token // 32] |= np.uint32(1 << token % 32)
        mask.setflags(write=False)
        return mask

    def advance(self, token: int) -> None:
        now = self._now(self.at)
        assert now is None or token in now, f"{token} was not allowed at step {self.at}"
        self.at += 1

    def accepts(self, tokens: Any) -> int:
        for i, token in enumerate(tokens):
            now = self._now(self.at + i)
            if now is not None and token not in now:
                return i
        return len(tokens)

    def forced(self) -> list[int]:
        run: list[int] = []
        while (now := self._now(self.at + len(run))) is not None and len(now) == 1:
            run += now
        return run

    def fresh(self) -> Listed:
        return Listed(self.steps, self.vocab_size, self.ends)

    def _now(self, step: int) -> list[int] | None:
        return self.steps[step] if step < len(self.steps) else None
