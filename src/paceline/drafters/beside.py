"""Drafters that need no flag: in a model's own files, in its folder or repository, or beside its file.

Names nominate files, keys and tensors say what they hold, and headers whether they belong to the model. All
that is told without loading anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.drafters.checkpoint import look_into, open_checkpoint
from paceline.drafters.checkpoint_names import flatten
from paceline.drafters.suitability import Facts, refuse_stranger
from paceline.errors import PacelineError
from paceline.weights.hf_files import read_optional
from paceline.weights.sidecars import nominated
from paceline.weights.source import Source

_ORDER = ("dspark", "dflash", "peagle", "eagle3", "mtp", "eagle", "model")
"""Which kind is taken where several lie there: what drafts best by what their authors report."""

_SMALLER = 2
"""A complete model beside another is a draft model if it has at most one part of so many of its bytes."""


@dataclass(frozen=True, slots=True)
class Found:
    """A drafter near a model.

    Attributes:
        kind: of the drafter; "" where its files do not say.
        path: of its file or folder, the model's own path where the model ships it.
        obstacle: why it cannot be used; "" if it can.
        rival: kind of the one that is used instead; "" for that one.
    """

    kind: str
    path: Path
    obstacle: str = ""
    rival: str = ""

    def describe(self, model: Path) -> str:
        """A few words for people."""
        if self.obstacle or self.rival:
            return f"{self.path.name} is not used: {self.obstacle or f'{self.rival} is there too'}"
        if self.path == model:
            return f"{self.kind}, in the model's own files"
        return f"{self.kind}, found in {self.path}"


def find_drafters(file: Source) -> list[Found]:
    """What could draft for a model: the one to use, those that could stand in, and what cannot be used.

    Of one kind, what lies beside the model comes before what is in it, since somebody put it there.
    """
    try:
        target = Facts.told_by(file)
    except PacelineError:
        return []
    found = [_inspect(path, file, target) for path in nominated(file.path)]
    if _announces(file):
        found.append(_inspect(file.path, file, target))
    usable = [one for one in found if not one.obstacle]
    usable.sort(key=lambda one: (_ORDER.index(one.kind), one.path == file.path))
    spare = [replace(one, rival=usable[0].kind) for one in usable[1:]]
    return [*usable[:1], *spare, *(one for one in found if one.obstacle)]


def _inspect(path: Path, model: Source, target: Facts) -> Found:
    kind = ""
    try:
        if "draft" in path.name.lower() and look_into(path).kind == "model":
            small = _nbytes(path) * _SMALLER <= model.nbytes
            return Found("model", path, "" if small else "it is a complete model, and not a small one")
        checkpoint = open_checkpoint(path)
        kind = checkpoint.kind
        refuse_stranger(checkpoint, target)
    except PacelineError as error:
        return Found(kind, path, error.message)
    except OSError as error:  # it vanished meanwhile
        return Found(kind, path, error.strerror or str(error))
    return Found(kind, path)


def _nbytes(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files)


def _announces(file: Source) -> bool:
    """Whether a model's settings speak of a head; they may still do when its tensors were left out."""
    if any(key.endswith(".nextn_predict_layers") for key in file.metadata):
        return True
    settings = flatten(read_optional(file.path / "config.json")) if file.path.is_dir() else {}
    return any(settings.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
