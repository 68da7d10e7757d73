"""Every drafter by name. Adding one is one file and one row here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core import Drafter, is_whole
from paceline.drafters.grammar import GrammarDrafter
from paceline.drafters.loading import (
    Host,
    found_drafter,
    head_dtype,
    load_any,
    load_head,
    load_model_drafter,
    vocabulary,
)
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.speculative_config import OTHERS, translate
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
        first: the option that a value without a name is for, as in "name:VALUE".
        given: whether that one must be given.
    """

    build: Callable[..., Drafter]
    options: Mapping[str, tuple[str, Callable[[Any], Any]]]
    aliases: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    first: str = ""
    given: bool = True


def whole_number(value: Any) -> int:
    """An option that came as text or as a number."""
    if isinstance(value, str) or is_whole(value):
        return int(value)
    raise TypeError(value)


def positive_number(value: Any) -> int:
    """A whole number from 1."""
    if (number := whole_number(value)) < 1:
        raise ValueError(value)
    return number


def path(value: Any) -> str:
    return os.fspath(Path(value))


def layer_list(value: Any) -> tuple[int, ...]:
    """Layers as a list, or as text: "2-12-21"."""
    found = value.split("-") if isinstance(value, str) else value
    return tuple(whole_number(one) for one in found)


def norm_side(value: Any) -> str:
    """Before or after a norm: "pre" or "post"."""
    if value not in ("pre", "post"):
        raise ValueError(value)
    return str(value)


def truth(value: Any) -> bool:
    """True or false, also in words."""
    if not isinstance(value, bool) and value not in ("true", "false"):
        raise ValueError(value)
    return value in (True, "true")


_Options = Mapping[str, tuple[str, Callable[[Any], Any]]]

_HEAD: _Options = {
    "model": ("model", path),
    "draft_model": ("model", path),
    "dtype": ("dtype", head_dtype),
    "draft_vocab_size": ("draft_vocab_size", whole_number),
    "threads": ("threads", whole_number),
}
"""Options of every head."""


_TREE: _Options = {"topk": ("topk", positive_number)}
"""Options of heads that draft trees besides."""


_BLOCK: _Options = {
    "layers": ("layers", layer_list),
    "sample_from_anchor": ("sample_from_anchor", truth),
}
"""Options of block drafters besides."""


def _head(kind: str, *aliases: str, options: _Options | None = None, given: bool = True) -> Row:
    """A row for heads of one kind.

    Args:
        options: besides those of every head.
        given: whether a path must be given.
    """
    build = partial(load_head, kind=kind)
    return Row(build, {**_HEAD, **(options or {})}, aliases, ("host",), "model", given)


_MODEL: _Options = {
    "model": ("model", path),
    "draft_model": ("model", path),
    "vocabulary": ("vocabulary", vocabulary),
    "max_model_len": ("max_model_len", whole_number),
    "threads": ("threads", whole_number),
    "quantize": ("quantize", path),
}
"""Options of draft models."""


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
        _MODEL,
        ("draft-model", "draft", "draft-simple", "standalone"),
        ("host",),
        first="model",
    ),
    "eagle": _head("eagle", "eagle1", "eagle2", options=_TREE),
    "eagle3": _head("eagle3", "draft-eagle3", options={"layers": ("layers", layer_list), **_TREE}),
    "peagle": _head("peagle", "p-eagle", options={"layers": ("layers", layer_list), **_TREE}),
    "mtp": _head(
        "mtp",
        "nextn",
        options={
            "hidden": ("hidden", norm_side),
            "chain": ("chain", norm_side),
            "heads": ("heads", positive_number),
            **_TREE,
        },
        given=False,
    ),
    "dflash": _head("dflash", "draft-dflash", options=_BLOCK),
    "dspark": _head("dspark", "draft-dspark", options=_BLOCK),
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

_ANY = Row(load_any, {**_HEAD, **_MODEL}, (), ("host",), "model")
"""Of "any": whatever is at a path."""

_AUTO = ("grammar", "suffix", "prediction")
_FIND: _Options = {"find": ("find", truth)}
"""Options of "auto" without a path: whether it looks for a drafter near the model."""


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
    asked = [_parse(spec) for spec in specs]
    named = any(name not in ("auto", "off") and _is_model(name) for name, _ in asked)
    for name, options in asked:
        if "num_speculative_tokens" in options:
            length = _draft_length(options.pop("num_speculative_tokens"))
        if name == "off":
            raise UsageError("'off' cannot be combined with drafters", "give 'off' alone, or leave it out")
        names: tuple[str, ...] = (name,)
        if name == "auto":
            names, head = _AUTO, _head_of_auto(options, host, find=not named)
            drafters += [] if head is None else [head]
            options = {}
        for each in names:
            one: Spec = {"method": each, **options}
            drafter = _build(one, vocab_size=vocab_size, identity=identity, host=host)
            if drafter is None:
                continue
            if any(drafter.name == other.name for other in drafters):
                raise UsageError(f"{drafter.name!r} is given twice", "give each drafter once")
            drafters.append(drafter)
    return Speculation(drafters, length)


def _is_model(name: str) -> bool:
    return "host" in _row(name).shared


def _head_of_auto(options: dict[str, Any], host: Host | None, *, find: bool) -> Drafter | None:
    """The head that auto was given a path of, or else the drafter found near the model.

    Args:
        find: whether to look at all; nobody does where another model was named.
    """
    if "model" in options:
        its = _arguments("auto", _HEAD, options)
        return None if host is None else load_head(host, **its)
    its = _arguments("auto", _FIND, options)
    return found_drafter(host) if find and host is not None and its.get("find", True) else None


def create(spec: Spec, *, vocab_size: int, identity: str = "", host: Host | None = None) -> Drafter:
    """Build one drafter from "name", "name:key=value,..." or {"method": name, key: value}."""
    drafter = _build(spec, vocab_size=vocab_size, identity=identity, host=host)
    assert drafter is not None, "a draft model needs to know its target"
    return drafter


def _build(spec: Spec, *, vocab_size: int, identity: str, host: Host | None) -> Drafter | None:
    name, options = _parse(spec)
    row = _row(name)
    arguments = _arguments(name, row.options, options)
    if row.first and row.given and row.first not in arguments:
        raise UsageError(f"drafter {name!r} needs a {row.first}", f"write {name}:{row.first.upper()}")
    if "host" in row.shared and host is None:
        return None
    offers = {"vocab_size": vocab_size, "identity": identity, "host": host}
    return row.build(**arguments, **{key: offers[key] for key in row.shared})


def _arguments(name: str, known: _Options, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments from a user's options."""
    arguments: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            hint = suggest(str(key), [*known, "num_speculative_tokens"])
            raise UsageError(f"{name} has no option {key!r}", hint)
        keyword, convert = known[key]
        try:
            arguments[keyword] = convert(value)
        except (TypeError, ValueError):
            raise UsageError(
                f"option {key} of {name} is {value!r}", f"give a {convert.__name__.replace('_', ' ')}"
            ) from None
    return arguments


def names() -> list[str]:
    return list(REGISTRY)


def _row(name: str) -> Row:
    return _ANY if name.lower() == "any" else REGISTRY[canonical(name)]


def canonical(name: str) -> str:
    """Our name of a method, whatever another engine calls it. Raises UsageError."""
    lowered = name.lower().replace("_", "-").strip("[]")
    for known, row in REGISTRY.items():
        if lowered == known or lowered in row.aliases:
            return known
    if lowered.endswith("-mtp"):  # other engines name the model too: deepseek_mtp, mimo_mtp
        return "mtp"
    if lowered in OTHERS:
        raise UsageError(f"{OTHERS[lowered]} do not run here", f"what runs: {', '.join(REGISTRY)}")
    raise UsageError(f"there is no drafter {name!r}", suggest(lowered, [*REGISTRY, "any", "auto", "off"]))


def _parse(spec: Spec) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, Mapping):
        return translate(spec)
    name, _, rest = spec.partition(":")
    pairs = [item.partition("=") for item in rest.split(",") if item]
    if name == "auto":  # a head beside what needs none
        if pairs and (not pairs[0][1] or "/" in pairs[0][0]):
            pairs[0] = ("model", "=", "".join(pairs[0]))
    elif rest and name != "off":
        row = _row(name)
        if row.first and pairs and pairs[0][0] not in row.options:
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
