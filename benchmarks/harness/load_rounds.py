"""Engines under the same load by turns: every engine is started anew for each level of every round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from harness.servers import ServerProcess
from paceline.core import SamplingParams
from paceline.tools.load import Clients, asking
from paceline.tools.load_figures import LoadFigures, Reply, figures
from paceline.tools.prompts import Prompt

WARM_UP = SamplingParams(temperature=0.0, max_tokens=8)

Start = Callable[[int], ServerProcess]
"""Starts an engine for so many clients."""


@dataclass(slots=True)
class Run:
    """One engine at one level in one round. `resident` is its memory, in bytes, after the last answer."""

    round: int
    clients: int
    engine: str
    figures: LoadFigures
    resident: int
    replies: list[Reply]

    @property
    def speed(self) -> float:
        return self.figures.output_tokens_per_s


@dataclass(frozen=True, slots=True)
class Ratio:
    """Output tokens/s over another engine's, round by round."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(slots=True)
class LevelResult:
    """Attributes:
    speeds: median output tokens/s by engine.
    best: the peer's fastest engine here; "" without a peer.
    over_best, over_off: ours against it, and against ourselves without speculation.
    """

    clients: int
    requests: int
    speeds: dict[str, float]
    best: str
    over_best: Ratio | None
    over_off: Ratio | None


@dataclass(slots=True)
class Equality:
    """Whether our own engines wrote the same, whatever the load.

    Attributes:
        prompts: that were asked; `texts` all answers that were compared.
        differences: "prompt: engine, clients, round" of answers unlike the first.
    """

    prompts: int
    texts: int
    differences: list[str] = field(default_factory=list)


def measure(
    engines: Mapping[str, Start],
    levels: Sequence[int],
    prompts: Callable[[int], Sequence[Prompt]],
    params: SamplingParams,
    *,
    rounds: int,
    timeout: float,
    note: Callable[[Run], None],
) -> list[Run]:
    """Run all engines at all levels. `prompts` gives those of a level; `note` is called after each run."""
    names = list(engines)
    runs: list[Run] = []
    for turn in range(rounds):
        for place, clients in enumerate(levels):
            for i in range(len(names)):
                name = names[(turn + place + i) % len(names)]
                with engines[name](clients) as server:
                    some = prompts(clients)
                    asking(server.client, WARM_UP, chat=None, timeout=timeout)(some[0])
                    ask = asking(server.client, params, chat=None, timeout=timeout)
                    replies = Clients(clients).run(ask, some, lambda: None)
                    runs.append(Run(turn, clients, name, figures(replies), server.resident_bytes(), replies))
                note(runs[-1])
    return runs


def judge(runs: Sequence[Run], *, ours: str, off: str, peer: str) -> list[LevelResult]:
    """Level by level; a peer's best engine is chosen by its median, with hindsight.

    Args:
        peer: what names of the peer's engines begin with.
    """
    found = []
    for clients in dict.fromkeys(run.clients for run in runs):
        here = [run for run in runs if run.clients == clients]
        by_engine = {name: [r.speed for r in here if r.engine == name] for name in {r.engine for r in here}}
        speeds = {name: median(some) for name, some in sorted(by_engine.items())}
        best = max((n for n in speeds if n.startswith(peer)), key=lambda n: speeds[n], default="")
        found.append(
            LevelResult(
                clients=clients,
                requests=here[0].figures.requests,
                speeds=speeds,
                best=best,
                over_best=_ratio(by_engine, ours, best),
                over_off=_ratio(by_engine, ours, off),
            )
        )
    return found


def equality(runs: Sequence[Run], ours: Sequence[str]) -> Equality:
    """Compare every answer of our engines with the first one to the same prompt."""
    first: dict[str, tuple[str, str, int]] = {}
    result = Equality(0, 0)
    for run in runs:
        for reply in run.replies if run.engine in ours else ():
            if reply.error:
                continue
            told = (reply.text, reply.finish_reason, reply.completion_tokens)
            result.texts += 1
            if first.setdefault(reply.prompt, told) != told:
                where = f"{run.engine}, {run.clients} clients, round {run.round}"
                result.differences.append(f"{reply.prompt}: {where}")
    result.prompts = len(first)
    return result


def _ratio(speeds: Mapping[str, Sequence[float]], above: str, below: str) -> Ratio | None:
    if not speeds.get(above) or not speeds.get(below) or not all(speeds[below]):
        return None
    by_round = [a / b for a, b in zip(speeds[above], speeds[below], strict=True)]
    return Ratio(median(by_round), min(by_round), max(by_round))
