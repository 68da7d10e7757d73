"""Every drafter by name. Adding one is one file and one row here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core import Drafter, is_whole
from paceline.drafters.grammar import GrammarDrafter
from paceline.drafters.loading import Host, load_model_drafter, vocabulary
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.errors import UsageError, suggest


@dataclass(frozen=True, slots=True)
class Row:
    """How to build one drafter.

    Attributes:
        build: the class or function that makes it; its keyword arguments are the options.
        options: option name -> (keyword of `build`, conversion); several names may mean one keyword.
        aliases: names of the same method in other engines.
        shared: which of vocab_size, identity and host `build` takes. One that takes the host is a model,
            and built only when there is one.
        first: the option that a value without a name is for, as in "name:VALUE"; it must be given.
    """

    build: Callable[..., Drafter]
    options: Mapping[str, tuple[str, Callable[[Any], Any]]]
    aliases: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    first: str = ""


def whole_number(value: Any) -> int:
    """An option that came as text or as a number."""
    if isinstance(value, str) or is_whole(value):
        return int(value)
    raise TypeError(value)


def path(value: Any) -> str:
    return os.fspath(Path(value))


REGISTRY: dict[str, Row] = {
    "suffix": Row(
        SuffixDrafter,
        {"max_tokens": ("max_tokens", whole_number), "file": ("file", path)},
        ("suffix-decoding", "ngram-cache"),
        ("vocab_size", "identity"),
    ),
    "grammar": Row(GrammarDrafter, {}),
    "prediction": Row(PredictionDrafter, {}, ("predicted-outputs",), ("vocab_size",)),
    "model": Row(
        load_model_drafter,
        {
            "model": ("model", path),
            "draft_model": ("model", path),
            "vocabulary": ("vocabulary", vocabulary),
            "max_model_len": ("max_model_len", whole_number),
            "threads": ("threads", whole_number),
            "quantize": ("quantize", path),
        },
        ("draft-model", "draft", "draft-simple", "standalone"),
        ("host",),
        first="model",
    ),
    "ngram": Row(
        NgramDrafter,
        {
            "min": ("shortest", whole_number),
            "max": ("longest", whole_number),
            "prompt_lookup_min": ("shortest", whole_number),
            "prompt_lookup_max": ("longest", whole_number),
        },
        ("prompt-lookup", "pld", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"),
    ),
}

_AUTO = ("grammar", "suffix", "prediction")


@dataclass(frozen=True, slots=True)
class Speculation:
    """What `speculate=` asked for.

    Attributes:
        drafters: in the order given; empty means off.
        draft_length: exact number of draft tokens per pass where available; None lets the planner choose.
    """

    drafters: list[Drafter] = field(default_factory=list)
    draft_length: int | None = None


Spec = str | Mapping[str, Any]


def configure(
    speculate: Spec | Sequence[Spec], *, vocab_size: int, identity: str = "", host: Host | None = None
) -> Speculation:
    """Turn "off", "auto", one drafter or a list of them into drafters.

    Args:
        speculate: as the user gave it.
        vocab_size: of the target; no drafter proposes ids outside it.
        identity: of the model and its tokenizer; what is stored under one is never read under another.
        host: the target, for drafters that are models; None checks their options and leaves them out.
    """
    if speculate == "off":
        return Speculation()
    specs = [speculate] if isinstance(speculate, str | Mapping) else speculate
    if not isinstance(specs, Sequence) or any(not isinstance(spec, str | Mapping) for spec in specs):
        raise UsageError(
            f"speculate is {speculate!r}", "give 'off', 'auto', a drafter's name or a list of them"
        )
    if not specs:
        raise UsageError("no drafter is given", "to turn speculation off, write 'off'")
    drafters: list[Drafter] = []
    length: int | None = None
    for spec in specs:
        name, options = _parse(spec)
        if "num_speculative_tokens" in options:
            length = _draft_length(options.pop("num_speculative_tokens"))
        names = _AUTO if name == "auto" else (name,)
        if name == "off":
            raise UsageError("'off' cannot be combined with drafters", "give 'off' alone, or leave it out")
        if name == "auto" and options:
            raise UsageError(f"'auto' takes no option {next(iter(options))!r}", "name the drafter it is for")
        for each in names:
            one: Spec = {"method": each, **options}
            drafter = _build(one, vocab_size=vocab_size, identity=identity, host=host)
            if drafter is None:
                continue
            if any(drafter.name == other.name for other in drafters):
                raise UsageError(f"{drafter.name!r} is given twice", "give each drafter once")
            drafters.append(drafter)
    return Speculation(drafters, length)


def create(spec: Spec, *, vocab_size: int, identity: str = "", host: Host | None = None) -> Drafter:
    """Build one drafter from "name", "name:key=value,..." or {"method": name, key: value}."""
    drafter = _build(spec, vocab_size=vocab_size, identity=identity, host=host)
    assert drafter is not None, "a draft model needs to know its target"
    return drafter


def _build(spec: Spec, *, vocab_size: int, identity: str, host: Host | None) -> Drafter | None:
    name, options = _parse(spec)
    row = REGISTRY[_canonical(name)]
    arguments: dict[str, Any] = {}
    for key, value in options.items():
        if key not in row.options:
            raise UsageError(f"{name} has no option {key!r}", suggest(key, list(row.options)))
        keyword, convert = row.options[key]
        try:
            arguments[keyword] = convert(value)
        except (TypeError, ValueError):
            raise UsageError(
                f"option {key} of {name} is {value!r}", f"give a {convert.__name__.replace('_', ' ')}"
            ) from None
    if row.first and row.first not in arguments:
        raise UsageError(f"drafter {name!r} needs a {row.first}", f"write {name}:{row.first.upper()}")
    if "host" in row.shared and host is None:
        return None
    offers = {"vocab_size": vocab_size, "identity": identity, "host": host}
    return row.build(**arguments, **{key: offers[key] for key in row.shared})


def names() -> list[str]:
    return list(REGISTRY)


def _canonical(name: str) -> str:
    lowered = name.lower().replace("_", "-").strip("[]")
    for known, row in REGISTRY.items():
        if lowered == known or lowered in row.aliases:
            return known
    raise UsageError(f"there is no drafter {name!r}", suggest(lowered, [*REGISTRY, "auto", "off"]))


def _parse(spec: Spec) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, Mapping):
        options = dict(spec)
        if not isinstance(name := options.pop("method", None), str):
            raise UsageError("a drafter given as a mapping needs 'method'", f"known: {', '.join(REGISTRY)}")
        return name, options
    name, _, rest = spec.partition(":")
    row = REGISTRY.get(_canonical(name)) if rest and name not in ("auto", "off") else None
    pairs = [item.partition("=") for item in rest.split(",") if item]
    if row is not None and row.first and pairs and pairs[0][0] not in row.options:
        pairs[0] = (row.first, "=", "".join(pairs[0]))
    for key, equals, _ in pairs:
        if not equals:
            raise UsageError(f"{spec!r} has {key!r} without a value", f"write {name}:{key}=VALUE")
    return name, {key.strip(): value.strip() for key, _, value in pairs}


def _draft_length(value: Any) -> int:
    try:
        length = whole_number(value)
    except (TypeError, ValueError):
        length = 0
    if not 1 <= length <= 64:
        raise UsageError(f"num_speculative_tokens is {value!r}", "give a whole number from 1 to 64")
    return length
