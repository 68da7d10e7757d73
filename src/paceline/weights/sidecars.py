"""Drafters that are published with a model: which files and folders their names suggest to look into.

Names only nominate; what a file holds decides (`drafters.beside`). In a repository of GGUF files drafters
carry a prefix, as llama.cpp has it: `dflash-Q8_0.gguf` beside `Q4_K_M.gguf`. Repositories of safetensors
have them in a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

KINDS = ("dspark", "dflash", "eagle3", "mtp")
"""Prefixes and folders, the best drafts first (DSpark, arXiv 2607.05147, compares the first three)."""

MOST = 16
"""So many candidates are looked into at most."""

_NAME = re.compile(
    r"(?<![A-Za-z])(dspark|dflash|p?eagle|mtp|nextn|speculators?|draft|drafter)(?![A-Za-z])", re.I
)
_PREFIX = re.compile(rf"({'|'.join(KINDS)})-", re.I)
_QUANT = re.compile(r"(?<![A-Za-z0-9])(I?Q\d\w*|BF16|F16|F32)(?![A-Za-z0-9])", re.I)


def nominated(model: Path) -> list[Path]:
    """Files and folders near a model that are called like a drafter, by name.

    Near means in the folder that the model's file, or its folder, lies in, and in its own folder.
    """
    found: list[Path] = []
    for place in (model, model.parent) if model.is_dir() else (model.parent,):
        try:
            entries = sorted(place.iterdir())
        except OSError:
            continue
        found += [path for path in entries if _NAME.search(path.stem) and _holds_weights(path)]
    return [path for path in found if not _same(path, model)][:MOST]


def is_sidecar(name: str) -> bool:
    """Whether a file of a repository is called like a drafter that is fetched with a model."""
    return _PREFIX.match(_base(name)) is not None


def without_sidecars(files: Iterable[str]) -> list[str]:
    """The files of a repository that are models, or all if all of them are drafters."""
    files = list(files)
    return [name for name in files if not is_sidecar(name)] or files


def sidecar_of(files: Sequence[str], chosen: str) -> list[str]:
    """Which files of a repository make the drafter to fetch with a model; empty if it has none.

    Args:
        files: all there are.
        chosen: the first of the model's own: a GGUF file, or config.json of a folder.
    """
    if is_sidecar(chosen):  # a drafter was asked for
        return []
    for kind in KINDS:
        if chosen.lower().endswith(".gguf"):
            named = [
                f for f in files if f.lower().endswith(".gguf") and _base(f).lower().startswith(kind + "-")
            ]
            if named:
                return [min(named, key=lambda name: (_strangeness(name, chosen), name))]
        else:
            inside = sorted(f for f in files if re.fullmatch(rf"{kind}/[^/]+\.(json|safetensors)", f, re.I))
            if any(name.endswith(".safetensors") for name in inside):
                return inside
    return []


def _strangeness(name: str, chosen: str) -> int:
    """How far a file's quantisation is from what is wanted: the model's own, else eight bits."""
    mine, its = _QUANT.search(_base(name)), _QUANT.search(_base(chosen))
    quant = mine[0].lower() if mine else ""
    if its is not None and quant == its[0].lower():
        return 0
    return 1 if quant == "q8_0" else 2


def _base(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _holds_weights(path: Path) -> bool:
    return path.suffix == ".gguf" or (path / "config.json").is_file()


def _same(path: Path, model: Path) -> bool:
    try:
        return path.samefile(model)
    except OSError:
        return False
