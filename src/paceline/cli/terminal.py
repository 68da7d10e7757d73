"""Where output goes: data to stdout, everything else to stderr, and neither breaks an odd terminal."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import TextIO

# A model can write escape sequences; a terminal would obey them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def prepare() -> None:
    """Pipes and files get UTF-8; a terminal that cannot show a character shows a replacement.

    A stream that the caller closed reads as empty, or swallows what is written.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  - as long as we run
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = stream.encoding if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="replace")


def write(text: str) -> None:
    """Write a piece of an answer at once; control characters never reach a terminal."""
    if sys.stdout.isatty():
        text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: object, *, indent: int | None = 2) -> None:
    """Write one JSON document and a newline."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=indent, allow_nan=False) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Tell the user something that is not the answer; where nobody can read it, that is no failure."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)


def flush() -> None:
    """Let a closed pipe show itself here, and not while the interpreter exits."""
    sys.stdout.flush()


def lost(error: OSError) -> int:
    """Stdout can no longer be written: say why, unless its reader just went away; return the exit code."""
    _drop(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 0
    note(f"error: {error}\nhint: check the disk, and where the output goes")
    return 1


def _drop(stream: TextIO) -> None:
    """Send what is still buffered nowhere, so that the interpreter does not complain while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
