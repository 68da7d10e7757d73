"""`paceline demo [MODEL]`: the same prompt plain and with speculation, side by side as it streams."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from paceline.cli import terminal
from paceline.cli.display import stdout
from paceline.cli.loading import load, locate
from paceline.cli.options import DEMO_MODEL, MachineFlags, Model
from paceline.cli.summary import decode_rate, in_words
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
    threads: Annotated[int | None, typer.Option("--threads", "-t", min=1, max=1024)] = None,
) -> int:
    locate(model)
    machine = MachineFlags(threads=threads)
    # Two engines: neither may profit from what the other has cached or learnt.
    engines = {name: load(model, machine, name)[0] for name in ("off", "auto")}
    asked: Any = prompt if engines["off"].chat_template is None else [{"role": "user", "content": prompt}]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for llm in engines.values():
        llm.generate("warm up", SamplingParams(temperature=0.0, max_tokens=2))
    lanes = _watch({name: llm.stream(asked, params) for name, llm in engines.items()})
    return _verdict(*lanes)


def _watch(streams: Any) -> list[Lane]:
    """Show the race; on a terminal as two columns, else nothing until it is over."""
    console = stdout()
    lanes: list[Lane] = []
    if not console.is_terminal:
        *_, lanes = race(streams)
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


def _verdict(plain: Lane, fast: Lane) -> int:
    if plain.result is None or fast.result is None:
        raise PacelineError("a stream ended without a result", "please report this")
    identical = plain.result.tokens == fast.result.tokens and plain.result.text == fast.result.text
    ratio = decode_rate(fast.result) / decode_rate(plain.result) if decode_rate(plain.result) else 0.0
    terminal.write(
        f"plain             {in_words(plain.result)}\n"
        f"with speculation  {in_words(fast.result)}\n"
        f"speed-up          {ratio:.2f}x\n"
        f"identical         {'yes' if identical else 'NO'}\n"
    )
    return 0 if identical else 1
