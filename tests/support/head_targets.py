"""A tiny native target, a head made for it, and the drafter of the two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core import Context, Drafter, Floats, SamplingParams
from paceline.drafters.head_loading import load_head
from paceline.drafters.loading import Host
from paceline.models.target import NativeTarget
from paceline.tools.profile import rows_at
from paceline.weights.gguf import GGUFFile
from support.draft_models import FixedCosts
from support.tiny_heads import ReferenceHead
from support.tiny_models import TinyModel
from support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

MODEL = TinyModel(width=64, hidden=96, heads=4, kv_heads=2, vocab=VOCAB_SIZE, layers=8)


def target_for(folder: Path, model: TinyModel = MODEL, **options: Any) -> NativeTarget:
    file = GGUFFile.open(model.write(folder / "target.gguf"))
    return NativeTarget.load(file, **{"threads": 1, "max_model_len": 512, **options})


def host_for(target: NativeTarget) -> Host:
    return Host(
        tiny_tokenizer(), target.vocab_size, target.threads, measure=lambda _: FixedCosts(), target=target
    )


def drafter_for(target: NativeTarget, path: Path, **options: Any) -> Drafter:
    return load_head(host_for(target), str(path), **{"dtype": "f32", **options})


def reference_for(target: NativeTarget, tiny: Any, reference: type[Any] = ReferenceHead) -> Any:
    """The float64 reference of a head, with what the target lends."""
    file = target.lent.file
    table = file.data("token_embd.weight").view(np.float32).reshape(target.vocab_size, -1)
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    matrix = file.data(head).view(np.float32).reshape(target.vocab_size, -1)
    return reference(tiny, table, matrix, target.lent.final_norm)


def states_of(target: NativeTarget, tokens: Sequence[int], layers: Sequence[int]) -> dict[int, Floats]:
    """What enters these layers for every token of a text."""
    target.listen(sorted(set(layers)))
    rows = rows_at(target, 0, len(tokens), 1)
    rows.tokens[:] = tokens
    hidden = target.forward(rows).hidden
    found = {layer: hidden[layer].copy() for layer in set(layers)}
    target.listen([])
    return found


def heard(
    drafter: Any, target: NativeTarget, tokens: Sequence[int], *, request: int = 0, **more: Any
) -> Context:
    """A request whose text the drafter has heard, but for the last token."""
    context = Context(request, list(tokens), len(tokens), **more)
    states = states_of(target, tokens, drafter.layers)
    drafter.hear(context, 0, {layer: found[:-1] for layer, found in states.items()})
    drafter.commit(context, None)
    return context


ON = SamplingParams(temperature=0.0, ignore_eos=True)


def tokens_of(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, count)]


def watched(drafter: Any) -> list[Floats]:
    """The logits of every wanted row of every pass from now on."""
    seen: list[Floats] = []
    run = drafter.head.run

    def watch(*args: Any) -> Any:
        result = run(*args)
        seen.extend(result.logits.copy())
        return result

    drafter.head.run = watch
    return seen


TEXTS = ((0, 2), (1, 3), (2, 40), (3, 100))


def compare(
    drafter: Any,
    target: NativeTarget,
    reference: Any,
    length: int = 5,
    texts: Sequence[tuple[int, int]] = TEXTS,
) -> None:
    """Hold guesses, and the logits that they were chosen by, to a reference; texts are seeds and lengths."""
    for seed, count in texts:
        tokens = tokens_of(seed, count)
        context = heard(drafter, target, tokens, request=seed, params=ON)
        taps = reference.tiny.taps
        states = states_of(target, tokens, taps)
        expected, logits = reference.chain(tokens, [states[tap][:-1] for tap in taps], length)
        seen = watched(drafter)
        draft = drafter.propose(context, length)
        assert draft.tokens == expected
        for mine, theirs in zip(seen, logits, strict=True):
            assert np.abs(mine - theirs).max() <= 2e-3 * np.abs(theirs).max()
