"""Heads for tests that have no target to run: states come from nowhere, every one as soon as it could."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core import Context, Draft, Outcome
from paceline.drafters.head_loading import load_head
from support.block_heads import TinyHead as BlockHead
from support.head_targets import host_for, target_for
from support.tiny_heads import TinyHead
from support.tiny_models import TinyModel
from support.tiny_mtp import TinyMtp
from support.tiny_peagle import TinyPeagle

_HEADS: dict[str, Any] = {
    "eagle3": lambda vocab: TinyHead(vocab=vocab, draft_vocab=24),
    "eagle": lambda vocab: TinyHead(kind="eagle", vocab=vocab, taps=(8,), draft_vocab=0),
    "peagle": lambda vocab: TinyPeagle(vocab=vocab, draft_vocab=24, mask=vocab - 1),
    "mtp": lambda vocab: TinyMtp(vocab=vocab),
    "dflash": lambda vocab: BlockHead(vocab=vocab, mask=vocab - 1, target_layers=8),
    "dspark": lambda vocab: BlockHead(
        vocab=vocab, mask=vocab - 1, target_layers=8, layout="deepspec", markov="vanilla"
    ),
}


@cache
def _loaded(name: str, vocab: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = TinyModel(width=64, hidden=96, heads=4, kv_heads=2, vocab=vocab, layers=8)
        target = target_for(Path(folder), model, max_model_len=256)
        path = _HEADS[name](vocab).write(Path(folder) / "head")
        return load_head(host_for(target), str(path))


class Hearing:
    """A head that hears random states of whatever text it is asked about; implements `core.Drafter`."""

    def __init__(self, name: str, vocab: int) -> None:
        self.name = name
        self.inner = _loaded(name, vocab)
        self.inner.reset()
        self._heard: dict[int, int] = {}

    def propose(self, context: Context, budget: int) -> Draft:
        self._hear(context)
        found: Draft = self.inner.propose(context, budget)
        return found

    def commit(self, context: Context, outcome: Outcome | None) -> None:
        self._hear(context)
        self.inner.commit(context, outcome)

    def forget(self, context: Context) -> None:
        self._heard.pop(context.request, None)
        self.inner.forget(context)

    def _hear(self, context: Context) -> None:
        start, end = self._heard.get(context.request, 0), len(context.tokens) - 1
        if end > start:
            rng = np.random.default_rng(start)
            width = self.inner.network.lender.lent.config.width
            states = {
                layer: rng.standard_normal((end - start, width)).astype(np.float32)
                for layer in self.inner.layers
            }
            self.inner.hear(context, start, states)
            self._heard[context.request] = end
