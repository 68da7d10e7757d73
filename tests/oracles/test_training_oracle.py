"""Heads that torch fits: their mathematics is the drafters', and seconds of fitting make them useful."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM
from paceline.errors import UsageError
from support.fitted import FITTED, KINDS, MISTAKES, Tiny, blind
from support.head_targets import ON, heard, states_of

pytestmark = pytest.mark.oracle

kinds = pytest.mark.parametrize("kind", KINDS)
TEXT = list(b"        return self._cache.reserve(track, rows - do")
"""What the recorded target may be shown."""


@pytest.fixture(scope="module", autouse=True)
def _threads() -> None:
    import torch

    torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(FITTED / "target", threads=1, max_model_len=512, speculate="off")


@pytest.fixture(scope="module")
def teacher(llm: LLM) -> Any:
    from paceline.training.teacher import Teacher

    return Teacher(llm.engine.target)


@pytest.fixture(scope="module")
def texts(llm: LLM, teacher: Any) -> Any:
    from oracles.record_fitted import all_taps, texts_of

    return texts_of(llm, 96, all_taps(teacher.depth))


def test_recorded_states_are_those_of_transformers(texts: Any) -> None:
    """What enters a layer, counted as transformers counts, and what its final norm makes of the last."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(FITTED / "target", dtype=torch.float32)
    text = texts[1]
    with torch.inference_mode():
        found = model(torch.from_numpy(text.tokens[None, :-1].astype(np.int64)), output_hidden_states=True)
    for layer, states in text.states.items():
        mine = torch.from_numpy(states)
        if layer == model.config.num_hidden_layers:
            mine = model.model.norm(mine)
        theirs = found.hidden_states[layer][0]
        assert (mine - theirs).abs().max() <= 1e-2 * theirs.abs().max()


def random_head(kind: str, teacher: Any, texts: Any, folder: Path) -> Any:
    """A head whose every part matters, as its file holds it."""
    import torch

    from oracles.record_fitted import tiny_head

    head = tiny_head(kind, teacher, texts)
    with torch.no_grad():
        for name, value in head.named_parameters():
            if "norm" in name:
                value.copy_(torch.rand_like(value) + 0.5)
            elif value.dim() == 2:
                value.copy_(torch.randn_like(value) * 1.5 / value.shape[1] ** 0.5)
    head.half().float().save(folder)
    return head


def rehearsed(head: Any, tokens: Sequence[int], states: Any, guesses: Sequence[int]) -> list[Any]:
    """Logits [ids] of every step of a text's last row, with these guesses in the place of true tokens."""
    import torch

    rows = len(tokens) - 1
    read = torch.tensor([[*tokens, *guesses]])
    given = head.teacher.normed(states[0]) if head.kind == "eagle" else head.fuse(states)  # without noise
    memory: Any = []
    found = []
    for j in range(len(guesses)):
        made = head.row(head.teacher.embed(read[:, 1 + j : 1 + j + rows]), given, memory)
        logits = head.lm_head(head.norm(made)) if head.kind == "eagle3" else head.teacher.output(made)
        found.append(logits[0, -1])
        given = head.onward(made)
    return found


def filled(head: Any, tokens: Sequence[int], states: Any, guesses: Sequence[int]) -> list[Any]:
    """The same of every slot of a block behind a text."""
    import torch

    from paceline.training.head import Batch

    known = dict(zip(head.taps, states, strict=True))
    batch = Batch(torch.tensor([list(tokens)]), torch.ones(1, len(tokens), dtype=torch.bool), known)
    hidden = head.hidden(batch, torch.tensor([[len(tokens) - 1]]))[0, 0, head.slots]
    logits = head.teacher.output(hidden)
    if head.kind == "dspark":
        before = torch.tensor([tokens[-1], *guesses[:-1]])
        markov = head.markov_head
        logits = logits[: len(before)] + markov.markov_w2(markov.markov_w1(before))
    return list(logits)


@kinds
def test_what_is_fitted_computes_what_drafts(
    kind: str, llm: LLM, teacher: Any, texts: Any, tmp_path: Path
) -> None:
    """Every guess of a draft is the likeliest by torch, given the guesses before it."""
    import torch

    head, tiny = random_head(kind, teacher, texts, tmp_path), Tiny()
    drafter = tiny.drafter(kind, tmp_path, dtype="f32")
    for length in (2, 3, 17, len(TEXT)):
        tokens = TEXT[:length]
        context = heard(drafter, tiny.target, tokens, request=length, params=ON)
        guesses = drafter.propose(context, 4).tokens
        assert len(guesses) == 4
        taps = states_of(tiny.target, tokens, head.taps)
        states = [torch.from_numpy(taps[tap][:-1])[None] for tap in head.taps]
        with torch.no_grad():
            rows = (filled if kind in ("dflash", "dspark") else rehearsed)(head, tokens, states, guesses)
        ids = head.kept if kind == "eagle3" else torch.arange(teacher.vocab_size)
        for logits, guess in zip(rows, guesses, strict=False):
            at = int((ids == guess).nonzero())
            assert logits[at] >= logits.max() - 5e-3 * logits.abs().max()


STEPS = {"eagle": 200, "eagle3": 300, "mtp": 300, "dflash": 400, "dspark": 300}
"""Until a head keeps twice what blind guesses do, and misses what it hears."""


@kinds
def test_a_head_that_was_fitted_for_seconds_is_useful_if_it_is_wired_right(
    kind: str, teacher: Any, texts: Any, tmp_path: Path
) -> None:
    """`test_fitted.py` holds heads that were fitted for longer to every mistake; these show early."""
    from oracles.record_fitted import tiny_head
    from paceline.training.fit import Recipe, fit

    steps, lines = STEPS[kind], list[str]()
    head = tiny_head(kind, teacher, texts)
    fit(head, texts, Recipe(steps=steps), lines.append)
    assert len(lines) == 10
    assert lines[-1].startswith(f"step {steps} of {steps}: loss ")
    tiny, folder = Tiny(), head.save(tmp_path)
    right = tiny.kept(tiny.drafter(kind, folder))
    assert right > 2 * tiny.kept(blind(kind))
    for name in ("states of the token before", "the token before"):
        drafter = tiny.drafter(kind, folder)
        MISTAKES[name](drafter)
        assert tiny.kept(drafter) < 0.85 * right, name


def test_what_cannot_be_fitted_is_refused(teacher: Any, texts: Any) -> None:
    from paceline.training.fit import Recipe, fit
    from paceline.training.kinds import new_head, taps_of
    from paceline.training.teacher import Teacher
    from support.stub_target import RandomRule, StubTarget

    with pytest.raises(UsageError, match="'eagel'"):
        taps_of("eagel", 8)
    with pytest.raises(UsageError, match="dflash reads several layers; this target has 4"):
        taps_of("dflash", 4)
    assert (taps_of("eagle3", 36), taps_of("mtp", 4)) == ((2, 18, 33), (4,))
    assert taps_of("dflash", 36) == (2, 10, 18, 26, 34)  # z-lab's for Qwen3-4B, by their inputs
    with pytest.raises(UsageError, match="the longest of 96 texts has 240 tokens, a window 1000"):
        fit(new_head("mtp", teacher, texts), texts, Recipe(window=1000))
    with pytest.raises(UsageError, match="the longest of 0 texts has 0 tokens"):
        fit(new_head("mtp", teacher, texts), [], Recipe())
    with pytest.raises(UsageError, match="lends no weights"):
        Teacher(StubTarget(RandomRule(64)))
