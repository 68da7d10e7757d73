"""From a function to a command: flags unfolded from dataclasses, and an exit code for every way out."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

from paceline.cli import terminal
from paceline.errors import PacelineError, UsageError


def verb(function: Callable[..., int | None]) -> Callable[..., int]:
    """Make a command of a function: option dataclasses become flags, every way out an exit code."""
    parameters = list(inspect.signature(function).parameters.values())
    hints = get_type_hints(function, include_extras=True)
    groups = {p.name: hints[p.name] for p in parameters if is_dataclass(hints[p.name])}

    @functools.wraps(function)
    def command(**values: Any) -> int:
        try:
            arguments = dict(values)
            for name, group in groups.items():
                own = {f.name: _from_environment(f, arguments.pop(f.name)) for f in fields(group)}
                arguments[name] = group(**own)
            code = function(**arguments) or 0
            terminal.flush()
            return code
        except PacelineError as error:
            terminal.note(f"error: {error.message}")
            if error.hint:
                terminal.note(f"hint: {error.hint}")
            return error.exit_code
        except OSError as error:  # a closed pipe or full disk under stdout, a device that went away
            return terminal.lost(error)
        except KeyboardInterrupt:
            terminal.note("interrupted")
            return 130

    flat: list[inspect.Parameter] = []
    for p in parameters:
        flat += _unfold(groups[p.name]) if p.name in groups else [p.replace(annotation=hints[p.name])]
    flat = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in flat]
    command.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in flat}
    del command.__wrapped__
    return command


def _unfold(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=_default(f), annotation=hints[f.name]
        )
        for f in fields(group)
    ]


def _default(f: Field[Any]) -> Any:
    if f.default_factory is not MISSING:
        return f.default_factory()
    return inspect.Parameter.empty if f.default is MISSING else f.default


def _from_environment(f: Field[Any], value: Any) -> Any:
    """For a list flag that was not given, its variable: one string, or a JSON list of strings."""
    text = os.environ.get(f"PACELINE_{f.name.upper()}")
    if value or f.default_factory is not list or not text:
        return value
    if not text.startswith("["):
        return [text]
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"PACELINE_{f.name.upper()} is not JSON: {error}", 'write ["one", "two"]') from None
    if not all(isinstance(item, str) for item in found):
        raise UsageError(f"PACELINE_{f.name.upper()} holds more than strings", 'write ["one", "two"]')
    return list(found)
