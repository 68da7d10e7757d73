"""`paceline doctor`"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from paceline.cli import terminal
from paceline.cli.options import Threads
from paceline.cli.verb import verb
from paceline.tools.doctor import Diagnosis, diagnose


@verb
def command(
    *,
    threads: Threads = None,
    json: Annotated[bool, typer.Option("--json", help="Print one object")] = False,
) -> int:
    found = diagnose(threads)
    if json:
        terminal.write_json(asdict(found))
    else:
        terminal.write("".join(f"{name:<12} {value}\n" for name, value in _lines(found)))
        for problem in found.problems:
            terminal.note(f"problem: {problem}")
    return 1 if found.problems else 0


def _lines(d: Diagnosis) -> list[tuple[str, str]]:
    machine, source = d.provenance["machine"], d.provenance["source"]
    versions = ", ".join(f"{name} {version}" for name, version in d.provenance["versions"].items())
    commit = f", commit {source['commit'][:12]}{' with changes' if source['dirty'] else ''}" if source else ""
    lines = [
        ("paceline", f"{d.provenance['paceline']}{commit}"),
        ("versions", versions),
        ("platform", machine["platform"]),
        ("cpu", f"{machine['cpu']}, {machine['logical_cores']} logical cores"),
        ("cpu flags", " ".join(machine["flags"])),
        ("memory", f"{machine['memory_bytes'] / 2**30:.1f} GiB"),
    ]
    if d.kernels:
        lines.append(("kernels", f"{d.kernels[0]}, chosen from {', '.join(d.kernels)}"))
    if d.threads is not None:
        lines.append(("threads", str(d.threads)))
    if d.read_bandwidth is not None:
        lines.append(("bandwidth", f"{d.read_bandwidth / 1e9:.1f} GB/s read with these threads"))
    if d.cache:
        lines.append(("cache", f"{d.cache['path']}, {d.cache['free_bytes'] / 2**30:.1f} GiB free"))
    lines += [("variable", f"{name}={value}") for name, value in d.provenance["environment"].items()]
    return lines
