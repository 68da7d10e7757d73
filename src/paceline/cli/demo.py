"""`paceline demo [MODEL]`: the same prompt plain and with speculation, side by side as it streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.display import stdout
from paceline.cli.loading import load, locate
from paceline.cli.options import DEMO_MODEL, MachineFlags, Model, Threads
from paceline.cli.summary import as_object, decode_rate, in_words
from paceline.cli.verb import verb
from paceline.core import SamplingParams
from paceline.errors import PacelineError
from paceline.tools.demo import PROMPT, Lane, race

REFRESH_S = 0.05


@verb
def command(
    model: Model = DEMO_MODEL,
    *,
    prompt: Annotated[str, typer.Option("--prompt", help="Default: edit a small program")] = PROMPT,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Longest answer")] = 256,
    threads: Threads = None,
    json: Annotated[bool, typer.Option("--json", help="Print one object, and show nothing else")] = False,
) -> int:
    locate(model)
    machine = MachineFlags(threads=threads)
    # Two engines: neither may profit from what the other has cached or learnt.
    engines, load_s = {}, 0.0
    for name in ("off", "auto"):
        engines[name], _, load_s = load(model, machine, name)
    asked: Any = prompt if engines["off"].chat_template is None else [{"role": "user", "content": prompt}]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for llm in engines.values():
        llm.generate("warm up", SamplingParams(temperature=0.0, max_tokens=2))
    streams = {name: llm.stream(asked, params) for name, llm in engines.items()}
    lanes = _last(race(streams)) if json else _watch(streams)
    results = [lane.result for lane in lanes if lane.result is not None]
    if len(results) < 2:
        raise PacelineError("a stream ended without a result", "please report this")
    plain, fast = results
    identical = plain.tokens == fast.tokens and plain.text == fast.text
    speed_up = decode_rate(fast) / decode_rate(plain) if decode_rate(plain) else 0.0
    if json:
        both = {"plain": as_object(plain, model, load_s), "speculation": as_object(fast, model, load_s)}
        terminal.write_json(both | {"speed_up": speed_up, "identical": identical})
    else:
        terminal.write(
            f"plain             {in_words(plain)}\n"
            f"with speculation  {in_words(fast)}\n"
            f"speed-up          {speed_up:.2f}x\n"
            f"identical         {'yes' if identical else 'NO'}\n"
        )
    return 0 if identical else 1


def _watch(streams: Any) -> list[Lane]:
    """Show the race; on a terminal as two columns, else nothing until it is over."""
    console = stdout()
    lanes: list[Lane] = []
    if not console.is_terminal:
        lanes = _last(race(streams))
        for lane in lanes:
            terminal.write(f"--- {_title(lane)}\n{''.join(text for text, _ in lane.pieces)}\n\n")
        return lanes
    from rich.live import Live

    drawn = 0.0
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for lanes in race(streams):
            if time.perf_counter() - drawn > REFRESH_S:
                live.update(_columns(lanes, console.height), refresh=True)
                drawn = time.perf_counter()
        live.update(_columns(lanes, console.height), refresh=True)
    return lanes


def _last(steps: Iterator[list[Lane]]) -> list[Lane]:
    *_, lanes = steps
    return lanes


def _columns(lanes: list[Lane], height: int) -> Any:
    from rich.panel import Panel
    from rich.table import Table

    grid = Table.grid(expand=True)
    for _ in lanes:
        grid.add_column(ratio=1)
    grid.add_row(*(Panel(_tail(lane, height - 6), title=_title(lane), height=height - 4) for lane in lanes))
    return grid


def _tail(lane: Lane, lines: int) -> Any:
    """The end of a lane's text that fits; drafted text in colour."""
    from rich.text import Text

    text = Text()
    for piece, drafted in lane.pieces:
        text.append(piece, style="green" if drafted else "")
    return Text("\n").join(text.split("\n")[-max(lines, 1) :])


def _title(lane: Lane) -> str:
    name = {"off": "plain", "auto": "with speculation"}[lane.name]
    rate = decode_rate(lane.result) if lane.result else lane.tokens_per_s
    return f"{name}: {lane.tokens} tokens, {rate:.0f} tokens/s"
