"""`paceline profile MODEL`"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from paceline.cli import terminal
from paceline.cli.loading import locate
from paceline.cli.options import DEMO_MODEL, Model, Quantize, Threads
from paceline.cli.verb import verb
from paceline.tools.profile import APART, ROWS, Profile, profile
from paceline.tools.provenance import provenance


@verb
def command(
    model: Model = DEMO_MODEL,
    *,
    threads: Threads = None,
    quantize: Quantize = None,
    context: Annotated[
        int, typer.Option("--context", min=0, help="Tokens in the KV cache during a pass")
    ] = 128,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="Time spent on each kind of pass")
    ] = 2.0,
    operations: Annotated[
        bool, typer.Option("--operations", help="Tell apart what a pass consists of, too")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one object")] = False,
) -> None:
    from paceline import native
    from paceline.models.target import NativeTarget
    from paceline.weights.source import open_model

    path = locate(model)
    kinds = len(ROWS) + 1 + (len(APART) if operations else 0)
    terminal.note(f"measuring for about {kinds * seconds:.0f} s")
    with open_model(path, quantize) as file:
        target = NativeTarget.load(file, threads=threads)
        found = profile(
            target,
            weight_bytes=target.weight_bytes,
            kv_bytes_per_token=target.cache.read(max(context, 1)) // max(context, 1),
            read_bandwidth=lambda: native.read_bandwidth(target.threads),
            context=context,
            budget_s=seconds,
            op_times=target.op_times if operations else None,
        )
    if json:
        terminal.write_json(asdict(found) | {"provenance": provenance()})
    else:
        _show(found)


def _show(found: Profile) -> None:
    lines = [
        f"weights   {found.weight_bytes / 1e6:.1f} MB, read by every pass",
        f"memory    {found.read_bandwidth / 1e9:.1f} GB/s read by the same threads",
        f"context   {found.context} tokens, {found.kv_bytes_per_token} bytes each",
        "",
        "  rows       ms   of one row   rows/s      GB/s   of memory",
    ]
    for cost in found.passes:
        kind = "prefill" if cost.outputs == 1 < cost.rows else ""
        lines.append(
            f"{cost.rows:>6} {cost.seconds * 1e3:>8.2f} {cost.ratio:>11.2f}x {cost.rows / cost.seconds:>8.0f}"
            f" {cost.bytes / cost.seconds / 1e9:>9.1f} {cost.bandwidth_share:>10.0%}  {kind}".rstrip()
        )
    terminal.write("\n".join([*lines, *_operations(found)]) + "\n")


def _operations(found: Profile) -> list[str]:
    """Milliseconds of each kind of operation, by rows of the pass."""
    if not found.operations:
        return []
    rows = sorted(found.operations[0].seconds)
    heads = ["1 row" if n == 1 else f"{n} rows" for n in rows]
    lines = ["", "  operation   " + "".join(f"{head:>11}" for head in heads) + "  (ms)"]
    for cost in found.operations:
        lines.append(f"  {cost.name:<12}" + "".join(f"{cost.seconds[n] * 1e3:>11.3f}" for n in rows))
    total = [sum(cost.seconds[n] for cost in found.operations) for n in rows]
    return [*lines, f"  {'all':<12}" + "".join(f"{seconds * 1e3:>11.3f}" for seconds in total)]
