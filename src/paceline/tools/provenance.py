"""Where a number came from: machine, versions, source revision, command line, model file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import paceline

PACKAGES = ("numpy", "tokenizers", "jinja2", "huggingface-hub", "typer", "rich")


def provenance() -> dict[str, Any]:
    """Everything about this process that a reader of its numbers should know."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "paceline": version("paceline"),
        "source": source_revision(),
        "machine": machine(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "environment": settings(),
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def settings() -> dict[str, str]:
    """Environment variables that change what Paceline does."""
    names = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "NO_COLOR", "OMP_NUM_THREADS")
    return {k: v for k, v in sorted(os.environ.items()) if k in names or k.startswith("PACELINE_")}


def source_revision() -> dict[str, Any] | None:
    """Commit of the checkout this package runs from; None for an installed wheel."""
    folder = Path(paceline.__path__[0])
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain"))}


def machine() -> dict[str, Any]:
    fields = _cpu_fields()
    return {
        "platform": platform.platform(),
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "logical_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "flags": sorted(
            f for f in fields.get("flags", "").split() if f.startswith(("avx", "amx", "f16c", "fma"))
        ),
    }


def describe_file(path: Path) -> dict[str, Any]:
    """Name, size and SHA-256 of a model file; of a folder, those of its weights one after the other."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for one in files:
        with one.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    size = sum(one.stat().st_size for one in files)
    return {"name": path.name, "bytes": size, "sha256": digest.hexdigest()}


def _cpu_fields() -> dict[str, str]:
    try:
        block = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
