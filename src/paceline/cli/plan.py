"""`paceline plan MODEL`"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer

from paceline.cli import terminal
from paceline.cli.loading import locate
from paceline.cli.options import EngineFlags
from paceline.cli.options import Model as ModelArgument
from paceline.cli.verb import verb
from paceline.errors import UsageError
from paceline.tools.plan import GPU_SHARE, MemoryPlan, memory_here, needs_of, plan

_UNITS = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}


@verb
def command(
    model: ModelArgument,
    *,
    engine: EngineFlags,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", "--parallel", "-np", min=1, help="Held at the same time")
    ] = 1,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Plan for so much RAM, as in 8GiB; default: what is free")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Plan for a GPU of this size, the file's weights as they are")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one object")] = False,
) -> int:
    if memory is not None and gpu is not None:
        raise UsageError("--memory and --gpu were both given", "plan for one of them")
    found = _plan(model, engine, max_num_seqs, memory, gpu)
    if json:
        terminal.write_json(asdict(found) | {"fits": found.fits})
    else:
        _show(found)
    return 0 if found.fits else 1


def _plan(name: str, engine: EngineFlags, sequences: int, memory: str | None, gpu: str | None) -> MemoryPlan:
    import paceline.engine  # noqa: F401  what a running model needs besides itself is in memory when measured
    from paceline.drafters.registry import configure
    from paceline.weights.source import open_model

    speculate = engine.speculation()
    configure(speculate, vocab_size=1)  # a typo shows before a model is fetched
    available = _available(memory, gpu)
    with open_model(locate(name), engine.quantize) as file:
        needs = needs_of(file, speculate, repacked=gpu is None)
    return plan(
        needs.target,
        available=available,
        runtime=needs.runtime if gpu is None else 0,
        drafters=needs.drafters,
        context=engine.max_model_len,
        sequences=sequences,
    )


def _available(memory: str | None, gpu: str | None) -> int:
    if gpu is not None:
        return int(_size("--gpu", gpu) * GPU_SHARE)
    return memory_here() if memory is None else _size("--memory", memory)


def _size(flag: str, text: str) -> int:
    """Bytes of "8GiB", "8G", "8192MiB" or "8589934592"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", text.strip().lower())
    if match is None:
        raise UsageError(f"{flag} is {text!r}", "give a size such as 8GiB or 512MiB")
    number, unit, kind = match.groups()
    base = 1000 if kind == "b" and unit else 1024
    return int(float(number) * float(base) ** _UNITS[unit]) if unit else int(float(number))


def _show(found: MemoryPlan) -> None:
    width = max(len(part.name) for part in found.parts)
    lines = [f"{part.name:<{width}}  {part.bytes / 2**20:>10.1f} MiB" for part in found.parts if part.bytes]
    lines.append(f"{'together':<{width}}  {found.total / 2**20:>10.1f} MiB")
    lines.append(f"{'there are':<{width}}  {found.available / 2**20:>10.1f} MiB")
    each = f"{found.context} tokens" + (f", {found.sequences} times" if found.sequences > 1 else "")
    verdict = "fits" if found.fits else "does not fit"
    lines.append(f"\n{each}: {verdict}; at most {found.largest_context} tokens would")
    lines += [f"- {line}" for line in (*found.advice, *found.notes)]
    terminal.write("\n".join(lines) + "\n")
