"""Do heads bring what the formula promises? Heads of each kind's shape, right as often as prescribed.

    python benchmarks/heads.py MODEL

For the model, heads of random weights are written and run for real; what they guess is then replaced so that
they are right with a known chance and know it (`harness.rehearsal`). The best speed-up follows from that and
from measured times (Leviathan et al., arXiv 2211.17192): the passes that drafts of n tokens leave, each
taking the time of drafting n tokens and of one pass of the model over n + 1 rows, for the best n. Both times
are those found while drafting: a pass takes longer after another network's weights went through the caches.
What is measured includes the planner, which knows none of these numbers beforehand and learns anew in each
answer, everything in Python, and the head's reading of the prompt. A head that boasts claims to be right
nine times of ten and is so one time in twenty.

In each round other places are right, since on one text a planner that learns is lucky or not; answers are
held against the plain ones before and after them, and the rounds' mean against the mean of what the formula
promises for each. A step that took more than twice as long as most of its answer was interrupted by other
work on the machine, and counts as twice.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness import rehearsal, results
from harness.rehearsal import BLOCK, KINDS, Rehearsed, Script, timed

from paceline.core import SamplingParams, Target
from paceline.drafters.dflash import BlockDrafter
from paceline.drafters.hearing import StateDrafter
from paceline.engine import LLM
from paceline.models.target import NativeTarget
from paceline.planning.pass_time import PassTime

PROMPT = "Tell the story of a lighthouse keeper who finds a message in a bottle."
LONGEST = 12
LENGTHS = (1, 3, 7, 8)
"""Of drafts that are timed, besides the longest; the pass takes one row more, and nine take two tiles."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How a head is to be.

    Attributes:
        chances: how often its first choice is right, its second, ...
        claim: how often it says that the first is; None means as often as it is.
    """

    chances: tuple[float, ...]
    claim: float | None = None

    def __str__(self) -> str:
        first, *others = map(str, self.chances)
        return (
            first
            + ("" if self.claim is None else f", claims {self.claim}")
            + "".join(f", else {other}" for other in others)
        )


BOAST = Arm((0.05,), claim=0.9)
TREES = (Arm((0.5, 0.2, 0.1)), Arm((0.7, 0.15, 0.05)))
"""The same first choices as a head of 0.5 or 0.7, and others beside them; only for heads that draft trees."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in seconds.

    Attributes:
        checks: [LONGEST + 1] of a pass of the model over 1 + n rows, after drafting n tokens.
        step: of a pass of the head over one row, or one block.
        first, more: of drafting one token, and each further one: passes, choosing, and whatever else.
        most: tokens that can be drafted.
    """

    checks: list[float]
    step: float
    first: float
    more: float
    most: int

    def formula(self, script: Script) -> float:
        """The best speed-up: that of the best fixed length on this very text."""
        plain = script.passes(0) * self.checks[0]
        times = [
            script.passes(n) * (self.checks[n] + self.first + (n - 1) * self.more)
            for n in range(1, self.most + 1)
        ]
        return plain / min(plain, *times)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        arm: how the head was; "" without one.
        round: decided at which places it was right.
    """

    kind: str
    arm: str
    round: int
    tokens: list[int]
    seconds: float
    tokens_per_pass: float = 1.0
    drafted: int = 0


class Stage:
    """A model and its heads.

    Args:
        options: of the heads, as in ",dtype=q4".
    """

    def __init__(self, llm: LLM, folder: Path, kinds: Sequence[str], tokens: int, options: str) -> None:
        self.llm = llm
        assert isinstance(llm.engine.target, NativeTarget)
        self.target = llm.engine.target
        self.prompt = llm.tokenize(PROMPT)
        self.params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.plain = self.answer("", "", 0, "off").tokens
        self.text = self.prompt + self.plain
        self.heads: dict[str, Rehearsed] = {}
        self.drafters: dict[str, StateDrafter] = {}
        self.specs: dict[str, str] = {}
        for kind in kinds:
            path = folder / kind
            rehearsal.write_head(kind, self.target.config, self.target.vocab_size, path, self.text)
            self.specs[kind] = f"{kind}:{path}{options if kind != 'eagle3' else ''}"
            llm.generate([1, 2], replace(self.params, max_tokens=1), speculate=self.specs[kind])
            self.drafters[kind] = cast(StateDrafter, llm.draft_models[-1])
            self.heads[kind] = Rehearsed(self.drafters[kind])

    def answer(self, kind: str, arm: str, turn: int, speculate: str) -> Answer:
        """Nothing carries over from answer to answer."""
        self.llm.clear()
        times: list[float] = []
        for chunk in self.llm.stream(self.prompt, self.params, speculate=speculate):
            times.append(time.perf_counter())
            found = chunk.completion
        assert found is not None
        steps = np.diff(times)
        seconds = float(np.minimum(steps, 2 * np.median(steps)).sum())
        its = found.speculation
        return Answer(kind, arm, turn, found.tokens, seconds, its.mean_acceptance_length, its.drafted)

    def costs(self, kind: str) -> Costs:
        """Measured now, while drafting."""
        drafter = self.drafters[kind]
        own = PassTime.measure(cast(Target, drafter.network))
        self.heads[kind].script = self.script(kind, Arm((0.7,)), 0)
        block = isinstance(drafter, BlockDrafter)
        most = drafter.model.config.slots if isinstance(drafter, BlockDrafter) else LONGEST
        lengths = [length for length in LENGTHS if length < most] + [most]
        drafting, checking = zip(*(self._times(kind, length) for length in lengths), strict=True)
        checks = np.interp(range(LONGEST + 1), [0, *lengths], [self._times(kind, 0)[1], *checking])
        more = (drafting[-1] - drafting[0]) / (most - 1)
        return Costs(checks.tolist(), own.cost(BLOCK if block else 1), drafting[0], more, most)

    def _times(self, kind: str, length: int) -> tuple[float, float]:
        """Seconds of drafting so many tokens, and of the pass that checks them, typically. The first draft,
        which reads the prompt, is left out."""
        speculate = f"{self.specs[kind]},num_speculative_tokens={length}" if length else "off"
        with timed(self.drafters[kind], "propose_many") as drafts, timed(self.target, "forward") as passes:
            self.answer(kind, "", 0, speculate)
        checks = [seconds for (rows,), seconds in passes if len(rows.tokens) == 1 + length]
        return median(seconds for _, seconds in drafts[1:]) if length else 0.0, median(checks)

    def script(self, kind: str, arm: Arm, turn: int) -> Script:
        claims = None if arm.claim is None else [arm.claim]
        script = Script(self.text, len(self.prompt), arm.chances, 1 + turn, claims)
        script.leave_out(self.heads[kind].own)
        return script

    def drafted(self, kind: str, arm: Arm, turn: int) -> Answer:
        self.heads[kind].script = self.script(kind, arm, turn)
        found = self.answer(kind, str(arm), turn, self.specs[kind])
        assert found.tokens == self.plain
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--chances", type=_numbers, default=[0.05, 0.2, 0.5, 0.7, 0.9])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--options", default="", help="of the heads, as in ,dtype=q4")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of rest before each head's round")
    parser.add_argument("--name", default="heads", help="of the results")
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    arguments = parser.parse_args()
    answers: list[Answer] = []
    costs: dict[str, list[Costs]] = {kind: [] for kind in arguments.kinds}
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(arguments.model, speculate="off", max_model_len=1024, threads=arguments.threads) as llm,
    ):
        stage = Stage(llm, Path(folder), arguments.kinds, arguments.tokens, arguments.options)
        for turn in range(arguments.rounds):
            for kind in arguments.kinds:
                time.sleep(arguments.pause)
                costs[kind].append(stage.costs(kind))
                for arm in arms(kind, arguments.chances):
                    answers += [stage.answer(kind, "", turn, "off"), stage.drafted(kind, arm, turn)]
                answers.append(stage.answer(kind, "", turn, "off"))
        formulas = {
            kind: {
                str(arm): [
                    fastest(some).formula(stage.script(kind, arm, turn)) for turn in range(arguments.rounds)
                ]
                for arm in arms(kind, arguments.chances)
            }
            for kind, some in costs.items()
        }
    report(arguments, answers, {kind: fastest(some) for kind, some in costs.items()}, formulas)


def arms(kind: str, chances: Sequence[float]) -> list[Arm]:
    trees = () if kind in ("dflash", "dspark") else TREES
    return [*(Arm((chance,)) for chance in chances), BOAST, *trees]


def fastest(costs: Sequence[Costs]) -> Costs:
    """Other work on the machine can only make something slower."""
    return Costs(
        checks=[min(times) for times in zip(*(one.checks for one in costs), strict=True)],
        step=min(one.step for one in costs),
        first=min(one.first for one in costs),
        more=min(one.more for one in costs),
        most=costs[0].most,
    )


def report(
    arguments: argparse.Namespace,
    answers: Sequence[Answer],
    costs: dict[str, Costs],
    formulas: dict[str, dict[str, list[float]]],
) -> None:
    prices = [
        [kind, one.step / one.checks[0], one.first / one.checks[0], one.more / one.checks[0]]
        for kind, one in costs.items()
    ]
    rows: list[list[object]] = []
    for kind, its in formulas.items():
        for arm, promised in its.items():
            some = [i for i, one in enumerate(answers) if (one.kind, one.arm) == (kind, arm)]
            plain = [(answers[i - 1].seconds + answers[i + 1].seconds) / 2 for i in some]
            measured = fmean(p / answers[i].seconds for p, i in zip(plain, some, strict=True))
            formula, passes = fmean(promised), fmean(answers[i].tokens_per_pass for i in some)
            rows.append([kind, arm, formula, measured, measured / formula, passes])
    figures: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "tokens": arguments.tokens,
        "costs": {kind: asdict(one) for kind, one in costs.items()},
        "answers": [asdict(replace(one, tokens=[])) for one in answers],
        "table": rows,
    }
    head = ("in passes of the model over one row", "step or block", "one token drafted", "each further one")
    markdown = results.table(head, prices) + "\n"
    head = ("head", "right", "formula", "measured", "measured / formula", "tokens per pass")
    results.write(arguments.name, figures, markdown + results.table(head, rows), arguments.out)


def _numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


if __name__ == "__main__":
    main()
