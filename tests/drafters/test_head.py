"""What all heads share: their cache, their trees, and that they change no byte of any text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core import ROOT, Context, Draft, Prices, SamplingParams
from paceline.drafters.loading import load_head
from paceline.engine.engine import Engine
from paceline.errors import ResourceError, UsageError
from paceline.models.target import NativeTarget
from support.engines import TOKENIZER, finish, run, same, submit
from support.head_targets import (
    ON,
    compare,
    drafter_for,
    heard,
    host_for,
    reference_for,
    states_of,
    target_for,
    tokens_of,
)
from support.mtp_heads import ReferenceHeads
from support.planners import FixedPlanner
from support.tiny_heads import ReferenceHead, TinyHead
from support.tiny_mtp import ReferenceMtp, TinyMtp
from support.tiny_tokenizer import VOCAB_SIZE

EAGLE3 = TinyHead(vocab=VOCAB_SIZE, draft_vocab=200, layout="speculators", norm_before_residual=True)
HEADS: dict[str, tuple[TinyHead, type[ReferenceHead]]] = {
    "eagle3": (EAGLE3, ReferenceHead),
    "eagle": (TinyHead(kind="eagle", vocab=VOCAB_SIZE, taps=(8,), draft_vocab=0), ReferenceHead),
    "mtp": (TinyMtp(vocab=VOCAB_SIZE), ReferenceMtp),
    "mtp of three heads": (
        TinyMtp(vocab=VOCAB_SIZE, layout="MiMo", biases=True, heads_in_file=3),
        ReferenceHeads,
    ),
}
SHORT = ((5, 12), (6, 13))
heads = pytest.mark.parametrize("name", HEADS)
CHEAP = Prices(plain=1.0, tokens=1.0, extra=[1e-6 * n for n in range(65)])


def loaded(name: str, folder: Path, **options: Any) -> tuple[NativeTarget, Any, Any]:
    """Target, drafter and reference."""
    tiny, reference = HEADS[name]
    target = target_for(folder)
    drafter = drafter_for(target, tiny.write(folder / "head"), **options)
    return target, drafter, reference_for(target, tiny, reference)


def go_on(drafter: Any, target: NativeTarget, context: Context, more: Sequence[int]) -> None:
    """The text goes on, as after a step of the engine."""
    start = len(context.tokens) - 1
    context.tokens += more
    states = states_of(target, context.tokens, drafter.layers)
    drafter.hear(context, start, {layer: found[start:-1] for layer, found in states.items()})
    drafter.commit(context, None)


def expected(reference: Any, target: NativeTarget, tokens: Sequence[int], length: int) -> list[int]:
    taps = reference.tiny.taps
    states = states_of(target, tokens, taps)
    guesses: list[int] = reference.chain(tokens, [states[tap][:-1] for tap in taps], length)[0]
    return guesses


@heads
def test_what_is_drafted_follows_from_the_text_alone(name: str, tmp_path: Path) -> None:
    """Whatever was drafted, taken and refused before; several texts side by side, that begin alike."""
    target, drafter, reference = loaded(name, tmp_path)
    rng = random.Random(name)
    contexts = [heard(drafter, target, tokens_of(i % 2, 30 + i), request=i, params=ON) for i in range(4)]
    for step in range(24):
        context = rng.choice(contexts)
        length = rng.randint(1, 5)
        draft = drafter.propose(context, length)
        assert draft.tokens == expected(reference, target, context.tokens, length)
        kept = draft.tokens[: rng.randint(0, length)]
        go_on(drafter, target, context, [*kept, rng.randrange(VOCAB_SIZE)])
        drafter.cache.kv.check_integrity()
        if step % 8 == 7:
            drafter.cache.release(drafter._seats[context.request].track)  # its room went to others


@heads
def test_asked_twice_it_says_the_same(name: str, tmp_path: Path) -> None:
    target, drafter, _ = loaded(name, tmp_path)
    context = heard(drafter, target, tokens_of(1, 20), params=ON)
    first = drafter.propose(context, 4).tokens
    assert drafter.propose(context, 4).tokens == first
    assert drafter.propose_many([context, context], [2, 0], None)[0].tokens == first[:2]


@heads
def test_many_requests_in_a_pass_are_drafted_for_as_if_alone(name: str, tmp_path: Path) -> None:
    target, drafter, _ = loaded(name, tmp_path)
    contexts = [heard(drafter, target, tokens_of(i, 9 + 7 * i), request=i, params=ON) for i in range(5)]
    passes: list[int] = []
    run_head = drafter.head.run

    def counted(feeds: Any, part: int) -> Any:
        passes.append(len(feeds))
        return run_head(feeds, part)

    drafter.head.run = counted
    together = drafter.propose_many(contexts, [4, 4, 3, 4, 1], None)
    assert passes == [5, 4, 4, 3]
    for context, draft in zip(contexts, together, strict=True):
        alone = drafter.propose(context, len(draft))
        assert alone.tokens == draft.tokens


@heads
def test_a_tree_says_at_every_node_what_a_chain_would(name: str, tmp_path: Path) -> None:
    target, drafter, reference = loaded(name, tmp_path)
    drafter.head.max_rows = 64
    for seed in range(3):
        drafter.reset()  # or it would know itself to be of no use
        context = heard(drafter, target, tokens_of(seed, 12 + seed), request=seed, params=ON)
        (draft,) = drafter.propose_many([context], [24], CHEAP)
        parents = draft.parents
        assert len(draft) > 12
        assert len(set(parents)) < len(parents), "no second choices"
        assert any(parents.count(p) > 1 and p != ROOT for p in parents), "no branch but at the root"
        for node in {ROOT, *parents}:
            path: list[int] = []
            at = node
            while at != ROOT:
                path.insert(0, draft.tokens[at])
                at = parents[at]
            children = [draft.tokens[i] for i, parent in enumerate(parents) if parent == node]
            assert children == ranked(reference, target, context.tokens, path)[: len(children)]


@heads
def test_topk_bounds_the_choices_beside_each_other(name: str, tmp_path: Path) -> None:
    target, drafter, _ = loaded(name, tmp_path)
    for topk in (1, 2):
        drafter.reset()
        drafter.topk = topk
        (draft,) = drafter.propose_many(
            [heard(drafter, target, tokens_of(1, 13), request=topk, params=ON)], [24], CHEAP
        )
        assert max(map(draft.parents.count, draft.parents)) == topk
        assert len(draft) >= 2


def ranked(reference: Any, target: NativeTarget, tokens: list[int], path: list[int]) -> list[int]:
    """The head's guesses behind a path of its own guesses, likeliest first."""
    taps = reference.tiny.taps
    states = states_of(target, tokens, taps)
    fed, given = tokens[1:], reference.fused([states[tap][:-1] for tap in taps])
    turn = getattr(reference, "turn", lambda _: None)
    for step, token in enumerate(path):
        turn(step)
        _, made = reference.rows(fed, given)
        fed, given = [*fed, token], np.concatenate([given, made[-1:]])
    turn(len(path))
    logits, _ = reference.rows(fed, given)
    return [int(reference.tiny.kept[i]) for i in np.argsort(-logits[-1], kind="stable")]


@heads
def test_behind_a_gap_it_sees_what_it_heard(name: str, tmp_path: Path) -> None:
    """A prefix that the target had cached is never heard; what is drafted then starts behind it."""
    target, drafter, reference = loaded(name, tmp_path)
    tokens = tokens_of(4, 60)
    states = states_of(target, tokens, drafter.layers)
    context = Context(1, tokens, len(tokens), params=ON)
    drafter.hear(context, 25, {layer: found[25:-1] for layer, found in states.items()})
    draft = drafter.propose(context, 4)
    taps = reference.tiny.taps
    alone, _ = reference.chain(tokens[25:], [states[tap][25:-1] for tap in taps], 4)
    assert draft.tokens == alone
    # Another request whose text is known from the start shares none of that.
    whole = heard(drafter, target, tokens, request=2, params=ON)
    assert drafter.propose(whole, 4).tokens == expected(reference, target, tokens, 4)
    # What that one leaves fills the gap of a third.
    drafter.forget(whole)
    third = Context(3, list(tokens), len(tokens), params=ON)
    drafter.hear(third, 30, {layer: found[30:-1] for layer, found in states.items()})
    assert drafter.propose(third, 4).tokens == expected(reference, target, tokens, 4)


@heads
def test_without_states_nothing_is_drafted(name: str, tmp_path: Path) -> None:
    target, drafter, _ = loaded(name, tmp_path)
    context = Context(1, tokens_of(1, 9), 9, params=ON)
    assert len(drafter.propose(context, 4)) == 0
    states = states_of(target, context.tokens, drafter.layers)
    drafter.hear(context, 0, {layer: found[:5] for layer, found in states.items()})
    assert len(drafter.propose(context, 4)) == 0


@heads
def test_texts_longer_than_a_pass_are_read_in_parts(name: str, tmp_path: Path) -> None:
    target, drafter, reference = loaded(name, tmp_path)
    drafter.head.max_rows = 32
    contexts = [heard(drafter, target, tokens_of(i, 100), request=i, params=ON) for i in range(2)]
    for context, draft in zip(contexts, drafter.propose_many(contexts, [3, 3], None), strict=True):
        assert draft.tokens == expected(reference, target, context.tokens, 3)


@heads
def test_an_error_of_one_shows(name: str, tmp_path: Path) -> None:
    """Another layer, another token, another position: each must break the comparison with the formulas."""
    target, drafter, reference = loaded(name, tmp_path)
    compare(drafter, target, reference, texts=SHORT)
    drafter.reset()
    reference.slip = 1
    with pytest.raises(AssertionError):
        compare(drafter, target, reference, texts=SHORT)
    reference.slip = 0
    fused = reference.fused
    for by in (-1, 1):
        drafter.reset()
        reference.fused = lambda states, by=by: fused([np.roll(state, by, axis=0) for state in states])
        with pytest.raises(AssertionError):
            compare(drafter, target, reference, texts=SHORT)
    reference.fused = fused
    if name == "eagle3":
        for layers in ("1-3-4", "3-5-6", "2-4-6"):
            other = drafter_for(target, tmp_path / "head", layers=tuple(map(int, layers.split("-"))))
            with pytest.raises(AssertionError):
                compare(other, target, reference, texts=SHORT)


class TreePlanner(FixedPlanner):
    """Asks with prices at which everything is worth its while, and so gets trees."""

    def _ask(self, drafter: Any, context: Context, budget: int) -> Draft:
        if not budget:
            return Draft.empty()
        found: Draft = drafter.propose_many([context], [budget], CHEAP)[0]
        assert len(found) <= budget
        return found


def tell_the_truth(drafter: Any, texts: Sequence[Sequence[int]], rng: random.Random) -> None:
    """Let the head's logits favour what comes next in one of these texts, most of the time."""
    after: dict[tuple[int, int], int] = {}
    for text in texts:
        after |= {(i, text[i + 1]): text[i + 2] for i in range(len(text) - 2)}
    place = {token: i for i, token in enumerate(drafter._target_ids)}
    run_head = drafter.head.run

    def truthful(feeds: Any, part: int) -> Any:
        result = run_head(feeds, part)
        rows = [(feed.positions[row], feed.tokens[row]) for feed in feeds for row in feed.wanted]
        for logits, row in zip(result.logits, rows, strict=True):
            token = after.get(row)
            if token in place and rng.random() < 0.8:
                logits[place[token]] = logits.max() + rng.choice([0.5, 9.0])
        return result

    drafter.head.run = truthful


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 0, 20]),
        top_p=rng.choice([1.0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        logit_bias=rng.choice([{}, {}, {VOCAB_SIZE - 1: 3.0, 4: -2.0}]),
        ignore_eos=rng.random() < 0.5,
        seed=rng.getrandbits(40),
        max_tokens=rng.choice([1, 2, 12, 24]),
    )


@pytest.mark.parametrize("seed", range(3))
@heads
def test_random_batches_equal_plain_decoding(name: str, seed: int, tmp_path: Path) -> None:
    """Chains and trees, greedy and drawn, several requests, cached prefixes, preemption, little room."""
    rng = random.Random(f"{name} {seed}")
    target, _, _ = loaded(name, tmp_path)
    small = target_for(tmp_path, pages=rng.choice([5, 8]))
    drafted = accepted = 0
    for _ in range(6):
        prompts = [[7, *tokens_of(rng.randrange(3), rng.randint(1, 50))] for _ in range(4)]
        params = [random_params(rng) for _ in range(4)]
        plain = [run(Engine(target, TOKENIZER), p, its) for p, its in zip(prompts, params, strict=True)]
        fresh = drafter_for(target, tmp_path / "head", dtype=rng.choice(["q8", "q4", "bf16"]))
        tell_the_truth(fresh, [[*p, *done.tokens] for p, done in zip(prompts, plain, strict=True)], rng)
        engine = Engine(small, TOKENIZER, context_limit=128)
        requests = [
            submit(engine, prompt, its, rng.choice([FixedPlanner, TreePlanner])(fresh, rng.choice([1, 3, 9])))
            for prompt, its in zip(prompts, params, strict=True)
        ]
        for before, done in zip(plain, finish(engine, *requests), strict=True):
            same(before, done)
            drafted += done.speculation.drafted
            accepted += done.speculation.accepted
        fresh.cache.kv.check_integrity()
        assert fresh._seats == {}
        assert fresh.cache.kv.available == fresh.cache.kv.pages
    assert drafted > accepted > drafted / 20


@heads
def test_a_draft_that_cannot_pay_is_not_begun(name: str, tmp_path: Path) -> None:
    target, drafter, _ = loaded(name, tmp_path)
    context = heard(drafter, target, tokens_of(1, 9), params=ON)
    drafter.head.run = None  # would fail
    dear = Prices(plain=1e-6, tokens=1.0, extra=[1e-6 * n for n in range(9)])
    assert len(drafter.propose_many([context], [8], dear)[0]) == 0


@heads
def test_numbers_that_overflow_end_the_drafting_and_harm_nobody(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, drafter, _ = loaded(name, tmp_path)

    def fail(*_: Any) -> Any:
        raise ResourceError("its numbers overflow")

    drafter.head.run = fail
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = run(Engine(target, TOKENIZER), tokens_of(1, 9), params)
    done = run(Engine(target, TOKENIZER), tokens_of(1, 9), params, FixedPlanner(drafter, 4))
    same(plain, done)
    assert drafter.broken == "its numbers overflow"
    assert "stays off" in caplog.text


def test_a_head_of_another_kind_is_named(tmp_path: Path) -> None:
    path = EAGLE3.write(tmp_path / "head")
    with pytest.raises(UsageError, match=r"kind eagle3, not eagle\nhint: write eagle3:"):
        drafter_for(target_for(tmp_path), path, kind="eagle")


def test_a_target_without_weights_cannot_lend_them(tmp_path: Path) -> None:
    target = target_for(tmp_path)
    host = replace(host_for(target), target=None)
    with pytest.raises(UsageError, match="lends no weights"):
        load_head(host, str(EAGLE3.write(tmp_path / "head")))
