"""Heads that were fitted to a tiny target, how often the engine takes their guesses, and mistakes to make.

A head whose inputs are off by one still drafts, and no error tells. So every mistake here is made on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core import Context, Floats, SamplingParams
from paceline.drafters.head_loading import load_head
from paceline.drafters.head_program import FROM_ITSELF
from paceline.drafters.loading import Host
from paceline.drafters.network import Costs
from paceline.engine.engine import Engine
from paceline.models.target import NativeTarget
from paceline.text.tokenizer import Tokenizer
from paceline.weights.source import open_model
from support.draft_models import FixedCosts
from support.drafters import Oracle
from support.engines import finish, submit
from support.planners import FixedPlanner

FITTED = Path(__file__).parents[1] / "training" / "fitted"
"""The target, one head of each kind, and what their texts begin with; `oracles.record_fitted` made them."""

KINDS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
DRAFTS, TOKENS = 4, 96
TEMPERATURES = {"eagle": 0.0, "eagle3": 1.0, "mtp": 1.0, "dflash": 0.0, "dspark": 0.0}
"""Where the mistakes below cost each of the recorded heads most: greedy text repeats itself."""

LEAST = {"eagle": 1.57, "eagle3": 1.01, "mtp": 1.14, "dflash": 1.01, "dspark": 1.24}
"""Drafted tokens that each recorded head must have kept per pass, and with any mistake does not."""

PROMPTS = (
    "A request that is cancelled ",
    "    def close(self) -> None:\n",
    "The planner buys ",
    "| Option | Meaning |\n",
    "class Sequence(Protocol):\n",
    "Every number in this ",
    "        if not self.",
    "from paceline.errors import ",
)
"""What no head was fitted to."""


class Tiny:
    """The recorded target, and what runs it."""

    def __init__(self, folder: Path = FITTED / "target") -> None:
        file = open_model(folder)
        self.tokenizer = Tokenizer.from_gguf(file.metadata)
        self.target = NativeTarget.load(file, threads=1, max_model_len=512)

    def drafter(self, kind: str, folder: Path, costs: Costs | None = None, **options: Any) -> Any:
        host = Host(
            self.tokenizer,
            self.target.vocab_size,
            1,
            measure=lambda _: costs or FixedCosts(),
            target=self.target,
        )
        return load_head(host, str(folder), kind=kind, **options)

    def kept(self, drafter: Any) -> float:
        """Mean number of drafted tokens that a pass keeps, of `DRAFTS`, while all prompts are answered."""
        engine, planner = Engine(self.target, self.tokenizer), FixedPlanner(drafter, DRAFTS)
        requests = []
        for seed, prompt in enumerate(PROMPTS):
            params = SamplingParams(
                temperature=TEMPERATURES[drafter.name], seed=seed, max_tokens=TOKENS, ignore_eos=True
            )
            requests.append(submit(engine, self.tokenizer.encode(prompt), params, planner))
        stats = [completion.speculation for completion in finish(engine, *requests)]
        return sum(s.accepted for s in stats) / sum(s.drafts for s in stats)


def blind(kind: str) -> Oracle:
    """What guesses the commonest byte whatever it hears, where a head of this kind would draft."""
    drafter = Oracle(lambda tokens: ord(" "))
    drafter.name = kind
    return drafter


Mistake = Callable[[Any], None]


def earlier_states(drafter: Any) -> None:
    """Hear of each token what the target made of the one before."""
    hear, last = drafter.hear, dict[tuple[int, int], Floats]()

    def late(context: Context, start: int, hidden: Mapping[int, Floats]) -> None:
        shifted = {}
        for layer, states in hidden.items():
            before = last.get((context.request, layer), states[:1])
            shifted[layer] = np.concatenate([before, states[:-1]])
            last[context.request, layer] = states[-1:].copy()
        hear(context, start, shifted)

    drafter.hear = late


def earlier_tokens(drafter: Any) -> None:
    """Read the token before the right one beside each state, or as the anchor of a block."""
    if hasattr(drafter, "model"):
        block = drafter._block
        drafter._block = lambda growth: replace(block(growth), anchor=growth.context.tokens[-2])
        return
    missing = drafter._missing

    def late(growth: Any) -> Any:
        feed, tokens = missing(growth), growth.context.tokens
        feed.tokens = tokens[len(tokens) - 1 - len(feed.tokens) : -1]
        return feed

    drafter._missing = late


def later_positions(drafter: Any) -> None:
    """Put what is drafted one place further from the text than it stands."""
    room = drafter._room
    drafter._room = lambda growth: room(growth) + 1
    if hasattr(drafter, "model"):
        block = drafter._block

        def later(growth: Any) -> Any:
            right, sequence = block(growth), growth.seat.track.sequence
            assert drafter.cache.kv.reserve(sequence, drafter.model.config.block + 1)
            return replace(right, start=right.start + 1, table=sequence.table.copy())

        drafter._block = later
        return
    run_head = drafter.head.run

    def run(feeds: Any, part: int) -> Any:
        for feed in feeds if part == FROM_ITSELF else ():
            feed.positions = [position + 1 for position in feed.positions]
            feed.slots = [slot + 1 for slot in feed.slots]
        return run_head(feeds, part)

    drafter.head.run = run


def other_layers(step: int) -> Mistake:
    """Read layers that are so many further up."""

    def shift(drafter: Any) -> None:
        drafter._order = tuple(layer + step for layer in drafter._order)
        drafter.layers = tuple(sorted(drafter._order))

    return shift


MISTAKES: dict[str, Mistake] = {
    "states of the token before": earlier_states,
    "the token before": earlier_tokens,
    "one place further": later_positions,
    "a layer too early": other_layers(-1),
    "a layer too late": other_layers(1),
}


def mistakes_of(kind: str) -> list[str]:
    """Those that can be made with a head of this kind: above the last layer there is none."""
    return [name for name in MISTAKES if name != "a layer too late" or kind not in ("eagle", "mtp")]
