"""What this machine and installation offer, and what stands in the way."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import Any

from paceline.tools.provenance import provenance
from paceline.weights import hub


@dataclass(slots=True)
class Diagnosis:
    """Attributes:
    kernels: kernel sets this CPU can run, best first; empty when the native core cannot be loaded.
    threads: threads used: one per physical core by default.
    read_bandwidth: bytes per second those threads read from memory.
    problems: what to mend, one sentence each.
    """

    provenance: dict[str, Any]
    cache: dict[str, Any]
    kernels: list[str] = field(default_factory=list)
    threads: int | None = None
    read_bandwidth: float | None = None
    problems: list[str] = field(default_factory=list)


def diagnose(threads: int | None = None) -> Diagnosis:
    """Look at everything; what fails becomes a problem, never an exception."""
    found = Diagnosis(provenance(), {})
    _look_at_cache(found)
    try:
        from paceline import native
        from paceline.models.target import physical_cores
    except ImportError as error:
        found.problems.append(f"the native core cannot be loaded ({error}); run `make build`, or reinstall")
        return found
    found.kernels = list(native.instruction_sets())
    found.threads = threads or physical_cores()
    found.read_bandwidth = native.read_bandwidth(found.threads)
    if found.kernels == ["portable"]:
        found.problems.append("this CPU has neither AVX2 nor AVX-512 VNNI; the portable kernels are slow")
    return found


def _look_at_cache(found: Diagnosis) -> None:
    folder = hub.cache_dir()
    place = folder
    while not place.exists():
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        found.problems.append(f"the cache directory {folder} cannot be read: {error}")
        return
    found.cache = {"path": str(folder), "exists": folder.exists(), "free_bytes": free}
    if free < 1 << 30:
        found.problems.append(
            f"only {free >> 20} MiB are free under {place}; set PACELINE_CACHE to another disk"
        )
