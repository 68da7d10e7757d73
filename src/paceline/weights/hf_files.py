"""Reading the small files of a Hugging Face folder, which are as hostile as its large ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import ModelFileError

DOWNLOAD = "the folder is damaged or incomplete; download it again"
MAX_BYTES = 64 << 20


def read_text(path: Path) -> str:
    """Read a text file of bounded size. Raises ModelFileError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ModelFileError(f"{path} has more than {MAX_BYTES} bytes", DOWNLOAD)
        return raw.decode("utf-8")
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}", DOWNLOAD) from None
    except UnicodeDecodeError:
        raise ModelFileError(f"{path} is not UTF-8", DOWNLOAD) from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that must hold a JSON object. Raises ModelFileError."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not JSON: {str(error) or 'nested too deep'}", DOWNLOAD) from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not hold a JSON object", DOWNLOAD)
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """Like `read_json`; an absent file is an empty object."""
    return read_json(path) if path.exists() else {}
