"""`--config FILE`: flags from YAML, behind the command line and the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from paceline.errors import suggest


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take defaults for a verb's flags from a YAML file whose keys are the flags' names.

    Raises:
        typer.BadParameter: it cannot be read, or holds a key that is no flag.
    """
    if path is None:
        return None
    flags = {p.name: p for p in ctx.command.params if p.name is not None}
    names = {alias.lstrip("-").replace("-", "_"): p.name for p in flags.values() for alias in p.opts}
    found: dict[str, Any] = {}
    for key, value in _load(path).items():
        name = names.get(str(key).lstrip("-").replace("-", "_"))
        if name is None or name == "config":
            known = sorted(n.replace("_", "-") for n in names if len(n) > 1)
            near = suggest(str(key).replace("_", "-"), known)
            raise typer.BadParameter(f"{path} has {key!r}, which is no flag; {near}")
        if value is None or f"PACELINE_{name.upper()}" in os.environ:
            continue  # list flags read their variable after their default
        several = getattr(flags[name], "multiple", False)
        found[name] = [value] if several and not isinstance(value, list) else value
    ctx.default_map = found
    return path


def _load(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{path} is not a mapping; write lines such as `port: 8000`")
    return found
