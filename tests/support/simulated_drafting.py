"""A planner and a draft model in simulated time: passes cost what they are said to, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.core import ROOT, Context, Outcome, Rows, SamplingParams
from paceline.drafters.model import ModelDrafter
from paceline.planning.pass_time import PassTime
from paceline.planning.planner import Planner
from paceline.text.pairing import pair
from paceline.text.respelling import Translator
from support.stub_target import Hashes, Ids, StubTarget
from support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Guessing:
    """A rule that knows the text, and guesses the token at each position with the chance given for it.

    It holds its guess to be as probable as it is, as a calibrated model would.
    """

    def __init__(self, text: Sequence[int], chance: Callable[[int], float], seed: int = 0) -> None:
        self.vocab_size = VOCAB_SIZE
        self._text = [*text, 0]
        self._chance = chance
        self._luck = np.random.default_rng(seed).random(len(self._text))

    def logits(self, histories: Hashes, tokens: Ids, positions: Ids) -> Any:
        rows = np.zeros((len(tokens), VOCAB_SIZE), np.float32)
        for row, position in zip(rows, (positions + 1).tolist(), strict=True):
            at = min(position, len(self._text) - 1)
            chance = self._chance(at)
            wrong = self._luck[at] >= chance
            row[(self._text[at] + wrong) % VOCAB_SIZE] = np.log(chance / (1 - chance) * (VOCAB_SIZE - 1))
        return rows


class TimedModel(StubTarget):
    """A stub whose passes take time on a clock."""

    clock: Clock
    seconds: PassTime

    def forward(self, rows: Rows) -> Any:
        self.clock.now += self.seconds.cost(len(rows.tokens))
        return super().forward(rows)


class Simulation:
    """Writes texts, one after the other, and tells how long each took.

    Args:
        target, draft: pass times of the two models: row count -> seconds.
    """

    def __init__(self, target: dict[int, float], draft: dict[int, float]) -> None:
        self.clock = Clock()
        self.target = PassTime(target)
        self._draft = PassTime(draft)
        self.planner = Planner(PassTime(target), [], clock=self.clock)
        self._requests = 0
        self.passes = 0
        self.drafted = 0
        self.accepted = 0

    def write(self, text: Sequence[int], prompt: int, chance: Callable[[int], float], seed: int = 0) -> float:
        """Write text[prompt:]; `chance` says, by position, how often the draft model is right. Seconds."""
        self._give(self._rule(text, chance, seed))
        self._requests += 1
        params = SamplingParams(temperature=0.0, max_tokens=len(text) - prompt)
        context = Context(self._requests, list(text[: prompt + 1]), prompt, params=params)
        start = self.clock.now
        self._let_hear(context, 0, prompt)
        self.planner.commit(context, None)
        while len(context.tokens) < len(text):
            self._step(context, text)
        self.planner.forget(context)
        return self.clock.now - start

    def plain(self, tokens: int) -> float:
        return (tokens - 1) * self.target.cost(1)

    def _let_hear(self, context: Context, start: int, count: int) -> None:
        """States of tokens, for drafters that read them."""
        if self.planner.layers:
            states = np.zeros((count, 1), np.float32)
            self.planner.hear(context, start, dict.fromkeys(self.planner.layers, states))

    def _rule(self, text: Sequence[int], chance: Callable[[int], float], seed: int) -> Guessing:
        return Guessing(text, chance, seed)

    def _give(self, rule: Guessing) -> None:
        """A draft model keeps what it learnt when its rule changes."""
        if self.planner.drafters:
            (drafter,) = self.planner.drafters
            assert isinstance(drafter, ModelDrafter)
            assert isinstance(drafter.model, StubTarget)
            drafter.model.rule = rule
            return
        tokenizer = tiny_tokenizer()
        model = TimedModel(rule, context_limit=4096, pages=600)
        model.clock, model.seconds = self.clock, self._draft
        translator = Translator(tokenizer, tokenizer, pair(tokenizer, tokenizer, VOCAB_SIZE, VOCAB_SIZE))
        drafter = ModelDrafter(model, translator, self._draft, clock=self.clock)
        self.planner = Planner(self.planner.pass_time, [drafter], clock=self.clock)

    def _step(self, context: Context, text: Sequence[int]) -> None:
        (draft,) = self.planner.plan([context], [len(text) - len(context.tokens) - 1])
        self.clock.now += self.target.cost(1 + len(draft))
        at, node, path = len(context.tokens), ROOT, []
        while True:
            token = text[at + len(path)]
            hits = [i for i, p in enumerate(draft.parents) if p == node and draft.tokens[i] == token]
            if not hits:
                break
            node = hits[0]
            path.append(node)
        committed = tuple(text[at : at + len(path) + 1])
        context.tokens += committed
        self._let_hear(context, at - 1, len(committed))
        self.passes += 1
        self.drafted += len(draft)
        self.accepted += len(path)
        self.planner.commit(context, Outcome(draft, tuple(path), committed) if len(draft) else None)
