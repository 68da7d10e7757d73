"""From a model's name on the command line to a loaded model, with progress on stderr."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.display import byte_progress, waiting
from paceline.cli.options import MachineFlags
from paceline.weights import hub

if TYPE_CHECKING:
    from paceline.engine import LLM
    from paceline.engine.llm import Speculate


def load(model: str, machine: MachineFlags, speculate: Speculate) -> tuple[LLM, Path, float]:
    """Resolve and load a model, with progress on stderr; return it, where it is and the seconds it took."""
    from paceline.engine import LLM  # imported here: verbs that load no model do not wait for it

    path = locate(model)
    started = time.perf_counter()
    with waiting(f"Loading {path.name}"):
        llm = LLM(
            path,
            quantize=machine.quantize,
            speculate=speculate,
            threads=machine.threads,
            max_model_len=machine.max_model_len,
        )
    return llm, path, time.perf_counter() - started


def locate(model: str) -> Path:
    """Return the file or folder that `model` means; fetches it with progress when it is not here."""
    with byte_progress(f"Fetching {model}") as progress:
        return hub.resolve(model, progress)
