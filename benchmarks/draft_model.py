"""Does a draft model bring what the formula promises? A synthetic pair, by turns with plain decoding.

Two random models are written: a target, and a draft model of an eighth of its bytes. Both run for real. The
draft model's passes take the time they take, but its logits are then overwritten: at each position it is
right with the chance asked for, and holds itself to be. So acceptance is known, and the best speed-up follows
from it and from the measured times of passes (Leviathan et al., arXiv 2211.17192): the mean acceptance length
of drafts of n tokens, over n passes of the draft model and one of the target over n + 1 rows, for the best n.
What is measured includes the planner, which knows none of these numbers beforehand.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness import results

from paceline.core import Output, Rows, SamplingParams
from paceline.engine import LLM
from paceline.models.target import NativeTarget
from paceline.planning.forecast import Forecast
from paceline.planning.pass_time import PassTime
from paceline.weights.quants import TensorType
from support.gguf_writer import write_gguf
from support.tiny_models import TinyModel
from support.vocabularies import NORMAL, byte_level

VOCABULARY = 8192
PROMPT = list(range(40, 60))
LONGEST = 12


@dataclass(frozen=True, slots=True)
class Round:
    """Attributes:
    draft_cost, check_costs: of a pass of the draft model, and of one over 1 + n rows, in plain passes.
    acceptance: share of drafted tokens that were right, given those before them.
    formula: the best speed-up for these.
    measured: tokens per second over those of plain decoding.
    """

    draft_cost: float
    check_costs: list[float]
    acceptance: float
    formula: float
    measured: float
    tokens_per_pass: float


class Rehearsed:
    """A draft model whose passes are real and whose opinions are given; implements `core.Target`."""

    def __init__(self, model: NativeTarget, acceptance: float) -> None:
        self._model = model
        self.text: list[int] = []
        self.wrong: list[bool] = []
        self._acceptance = acceptance
        self._edge = np.float32(np.log(acceptance / (1 - acceptance) * (VOCABULARY - 1)))
        for name in ("vocab_size", "context_limit", "max_rows", "page_size", "pages", "window"):
            setattr(self, name, getattr(model, name))
        self.move, self.copy_page = model.move, model.copy_page

    def rehearse(self, text: list[int], seed: int) -> None:
        """Know this text from now on, and fix where to be wrong."""
        self.text = [*text, 0]
        self.wrong = (np.random.default_rng(seed).random(len(self.text)) >= self._acceptance).tolist()

    def forward(self, rows: Rows) -> Output:
        output = self._model.forward(rows)
        if output.logits is not None and self.text:
            for row, position in zip(output.logits, rows.positions[rows.wanted].tolist(), strict=True):
                at = min(position + 1, len(self.text) - 1)
                row[:] = 0.0
                row[(self.text[at] + self.wrong[at]) % VOCABULARY] = self._edge
        return output


def write_models(folder: Path) -> tuple[Path, Path]:
    extra = {f"w{i}": NORMAL for i in range(VOCABULARY - 257)}
    tokenizer = byte_level(["a b"], extra=extra)
    paths = []
    for name, layers, hidden in (("target", 24, 4608), ("draft", 3, 3808)):
        model = TinyModel(
            kind=TensorType.Q4_0,
            vocab=VOCABULARY,
            layers=layers,
            heads=24,
            kv_heads=8,
            head_dim=64,
            width=1536,
            hidden=hidden,
            context=4096,
        )
        paths.append(write_gguf(folder / f"{name}.gguf", model.metadata() | tokenizer, model.tensors()))
    return paths[0], paths[1]


def run(llm: LLM, rehearsed: Rehearsed, spec: str, tokens: int, round_: int) -> Round:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    plain = llm.generate(PROMPT, params, speculate="off")
    rehearsed.rehearse(PROMPT + plain.tokens, round_)
    drafted = llm.generate(PROMPT, params, speculate=spec)
    again = llm.generate(PROMPT, params, speculate="off")
    assert drafted.tokens == plain.tokens == again.tokens
    target_costs, draft_costs = PassTime.measure(llm.engine.target), PassTime.measure(rehearsed)  # type: ignore[arg-type]
    llm.clear()  # measuring overwrote the first pages
    token = target_costs.cost(1)
    checks = [target_costs.cost(1 + n) / token for n in range(LONGEST + 1)]
    missed = rehearsed.wrong[len(PROMPT) + 1 : -1]
    acceptance = 1.0 - sum(missed) / len(missed)
    cost = draft_costs.cost(1) / token
    formula = max(Forecast(acceptance, n, cost, checks[n]).speedup for n in range(LONGEST + 1))
    seconds = (plain.timings.decode_s + again.timings.decode_s) / 2
    return Round(
        cost,
        checks,
        acceptance,
        formula,
        seconds / drafted.timings.decode_s,
        drafted.speculation.mean_acceptance_length,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write_models(Path(folder))
        spec = f"model:{draft}"
        with LLM(target, speculate=spec, max_model_len=1024, threads=arguments.threads) as llm:
            (drafter,) = llm.draft_models
            assert isinstance(drafter.model, NativeTarget)
            rehearsed = Rehearsed(drafter.model, arguments.acceptance)
            drafter.model = drafter.cache.model = rehearsed  # type: ignore[assignment]
            bytes_ = [llm.engine.target.weight_bytes, rehearsed._model.weight_bytes]  # type: ignore[attr-defined]
            run(llm, rehearsed, spec, 60, 999)  # warms up
            rounds = [run(llm, rehearsed, spec, arguments.tokens, i) for i in range(arguments.rounds)]
    report(rounds, bytes_, arguments.out)


def report(rounds: list[Round], weight_bytes: list[int], folder: Path) -> None:
    ratio = median(r.measured / r.formula for r in rounds)
    figures: dict[str, Any] = {
        "weight_bytes": weight_bytes,
        "measured_over_formula": ratio,
        "rounds": [asdict(r) for r in rounds],
    }
    names = ("draft_cost", "acceptance", "formula", "measured", "tokens_per_pass")
    head = ("", "draft pass", "acceptance", "formula", "measured", "tokens per pass", "measured / formula")
    middle = [median(getattr(r, name) for r in rounds) for name in names]
    results.write("draft-model", figures, results.table(head, [["median of rounds", *middle, ratio]]), folder)


if __name__ == "__main__":
    main()
