"""Draft models on stubs: a rule, a vocabulary, and the drafter between them and the tiny tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.drafters.model import ModelDrafter
from paceline.text.pairing import Mode, pair
from paceline.text.respelling import Translator
from paceline.text.tokenizer import Tokenizer
from support.stub_target import Hashes, Ids, Rule, StubTarget
from support.tiny_tokenizer import EOS, VOCAB_SIZE, metadata, tiny_tokenizer
from support.vocabularies import CONTROL, byte_characters, byte_level


class FixedCosts:
    """Pass times that nothing changes: `first` seconds and `row` for each further row."""

    def __init__(self, first: float = 1e-3, row: float = 1e-5) -> None:
        self.first = first
        self.row = row
        self.seen: list[int] = []

    def cost(self, rows: int) -> float:
        return self.first + self.row * (rows - 1)

    def observe(self, rows: int, seconds: float) -> None:
        self.seen.append(rows)

    def relax(self) -> None:
        """Nothing is observed, nothing forgotten."""


class Reordered:
    """A rule as a model with other ids would have it: id i of the draft is id order[i] of the rule.

    Histories are those of the draft's own ids, so it agrees with the rule only as far as that does not
    depend on them.
    """

    def __init__(self, rule: Rule, order: Sequence[int]) -> None:
        self.vocab_size = len(order)
        self._rule = rule
        self._order = np.asarray(order, np.int32)

    def logits(self, histories: Hashes, tokens: Ids, positions: Ids) -> Any:
        return self._rule.logits(histories, self._order[tokens], positions)[:, self._order]


class Padded:
    """A rule with more rows of logits than its vocabulary has tokens; the likeliest of all are among them."""

    def __init__(self, rule: Rule, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._rule = rule

    def logits(self, histories: Hashes, tokens: Ids, positions: Ids) -> Any:
        known = np.minimum(tokens, self._rule.vocab_size - 1)
        inner = self._rule.logits(histories, known, positions)
        return np.pad(inner, ((0, 0), (0, self.vocab_size - inner.shape[1])), constant_values=99.0)


def shuffled(seed: int = 0, order: Sequence[int] | None = None) -> tuple[Tokenizer, list[int]]:
    """The tiny tokenizer under other ids, and the order: its id i is id order[i] of the tiny one."""
    order = np.random.default_rng(seed).permutation(VOCAB_SIZE).tolist() if order is None else list(order)
    place = {old: new for new, old in enumerate(order)}
    plain = metadata()
    prefix = "tokenizer.ggml."
    changed = {
        prefix + "tokens": [plain[prefix + "tokens"][i] for i in order],
        prefix + "token_type": [plain[prefix + "token_type"][i] for i in order],
        prefix + "eos_token_id": place[plain[prefix + "eos_token_id"]],
        prefix + "bos_token_id": place[plain[prefix + "bos_token_id"]],
    }
    return Tokenizer.from_gguf(plain | changed), order


def other_merges() -> tuple[Tokenizer, list[int]]:
    """The tiny tokenizer's bytes with other words, and for each id the tiny one's nearest."""
    merges = ["a b", "ab c", "t h", "th e", "1 2"]
    tokenizer = Tokenizer.from_gguf(byte_level(merges, extra={"<end>": CONTROL}, eos_token_id=261))
    characters = {char: byte for byte, char in enumerate(byte_characters())}
    order = [characters[char] for char in byte_characters()]
    return tokenizer, [*order, *(ord(merge.split(" ")[0][0]) for merge in merges), EOS]


def draft_model(
    rule: Rule,
    tokenizer: Tokenizer | None = None,
    *,
    target: Tokenizer | None = None,
    target_vocab: int = VOCAB_SIZE,
    mode: Mode | None = None,
    costs: FixedCosts | None = None,
    **stub: Any,
) -> ModelDrafter:
    target = target or tiny_tokenizer()
    draft = tokenizer or target
    pairing = pair(target, draft, target_vocab, rule.vocab_size, mode)
    model = StubTarget(rule, **{"context_limit": 512, "max_rows": 16, "pages": 80, **stub})
    return ModelDrafter(model, Translator(target, draft, pairing), costs or FixedCosts())
