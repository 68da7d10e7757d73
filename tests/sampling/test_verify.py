"""Verification: exact by enumeration, equal token by token, right in distribution, and wrong when broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from paceline.core import ROOT, Draft, Floats, SamplingParams
from paceline.sampling import Noise, Sampler, verify, walk
from paceline.sampling.noise import Doubles, Stream
from support.goodness import chi_square_fits
from support.table_model import Guess, decode, logits_after, nothing

REJECTION = SamplingParams(verification="rejection")


def tree(tokens: Sequence[int], parents: Sequence[int], probs: ArrayLike | None = None) -> Draft:
    n = len(tokens)
    given = None if probs is None else np.asarray(probs, np.float32)
    return Draft(list(tokens), list(parents), [0.5] * n, ("test",) * n, given)


def chain(tokens: Sequence[int], probs: ArrayLike | None = None) -> Draft:
    return tree(tokens, range(-1, len(tokens) - 1), probs)


def logits_of(p: ArrayLike, rows: int) -> Floats:
    with np.errstate(divide="ignore"):
        return np.tile(np.log(np.asarray(p)).astype(np.float32), (rows, 1))


class Scripted(Noise):
    """Noise whose coins, for each position and sibling, and whose residual draw are written down."""

    def __init__(self, vocab_size: int, coins: Sequence[Sequence[float]], draw: float) -> None:
        super().__init__(0, vocab_size)
        self.coins, self.draw = coins, draw

    def uniform(self, position: int, ids: ArrayLike, stream: Stream) -> Doubles:
        if stream == Stream.RESIDUAL:
            return np.array([self.draw])
        if stream == Stream.ACCEPT:
            return np.array(self.coins[position][: len(np.atleast_1d(ids))])
        return super().uniform(position, ids, stream)


def outcome(
    p: ArrayLike, draft: Draft, coins: Sequence[Sequence[float]], draw: float = 0.5
) -> list[tuple[int, int]]:
    """What the walk commits where every row has the distribution p and the coins fall so."""
    vocabulary = len(np.asarray(p))
    sampler = Sampler(REJECTION, (), (), vocabulary, seed=0)
    sampler.noise = Scripted(vocabulary, coins, draw)
    rows = logits_of(p, 1 + len(draft))
    return list(walk(draft, sampler, rows.argmax(axis=1).astype(np.int32), rows, 0))


def grid(cells: int) -> list[float]:
    """Midpoints: averaging over them integrates exactly every step at a multiple of 1 / cells."""
    return [(i + 0.5) / cells for i in range(cells)]


# ---- rejection, one position, every coin and every draw


def exact_law(
    p: Sequence[float], q: Sequence[float] | None, given: Sequence[float] | None, cells: int
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """Acceptance, law of the corrections, and law of the output; drafts drawn from q, told to be `given`.

    With q None the draft is always token 0, one-hot.
    """
    accepted, corrections, outputs = 0.0, np.zeros(len(p)), np.zeros(len(p))
    for x, chance in enumerate([1.0] if q is None else q):
        if chance == 0:
            continue
        draft = chain([x], None if q is None else [given])
        for coin, draw in product(grid(cells), grid(cells)):
            token, node = outcome(p, draft, [[coin]], draw)[0]
            share = chance / cells**2
            outputs[token] += share
            accepted += share * (node == 0)
            corrections[token] += share * (node == ROOT)
    return accepted, corrections / max(1 - accepted, 1e-300), outputs


def test_sampled_draft_at_one_position() -> None:
    p, q = [0.2, 0.5, 0.3], [0.5, 0.3, 0.2]
    accepted, residual, outputs = exact_law(p, q, q, 15)
    assert accepted == pytest.approx(0.70, abs=1e-9)
    np.testing.assert_allclose(residual, [0, 2 / 3, 1 / 3], atol=1e-9)
    np.testing.assert_allclose(outputs, p, atol=1e-9)


def test_greedy_draft_at_one_position(monkeypatch: pytest.MonkeyPatch) -> None:
    p = [0.2, 0.5, 0.3]
    accepted, residual, outputs = exact_law(p, None, None, 40)
    assert accepted == pytest.approx(0.20, abs=1e-9)
    np.testing.assert_allclose(residual, [0, 0.625, 0.375], atol=1e-9)
    np.testing.assert_allclose(outputs, p, atol=1e-9)
    monkeypatch.setattr(verify, "_residual", lambda p, q: p)
    _, _, wrong = exact_law(p, None, None, 40)
    np.testing.assert_allclose(wrong, [0.36, 0.40, 0.24], atol=1e-9)


def test_q_must_be_what_was_sampled() -> None:
    """Raw q where top_k=2 was in force accepts everything and copies the drafter's distribution."""
    p, raw, q = [0.5, 0.5, 0, 0], [0.4, 0.3, 0.2, 0.1], [4 / 7, 3 / 7, 0, 0]
    accepted, _, outputs = exact_law(p, q, q, 8)
    assert accepted == pytest.approx(0.9286, abs=5e-5)
    np.testing.assert_allclose(outputs, p, atol=1e-9)
    accepted, _, outputs = exact_law(p, q, raw, 8)
    assert accepted == pytest.approx(1.0)
    np.testing.assert_allclose(outputs, q, atol=1e-9)


@pytest.mark.parametrize(
    ("length", "expected"), [(1, "2/3"), (2, "10/9"), (3, "38/27"), (4, "130/81"), (5, "422/243")]
)
def test_expected_accepted_tokens_of_a_chain(length: int, expected: str) -> None:
    """P=(1/3, 2/3), Q=(2/3, 1/3): every draft, every coin."""
    p, q = (1 / 3, 2 / 3), (Fraction(2, 3), Fraction(1, 3))
    total = Fraction(0)
    for tokens in product((0, 1), repeat=length):
        draft = chain(tokens, [[2 / 3, 1 / 3]] * length)
        chance = np.prod([q[token] for token in tokens]) / 2**length
        for coins in product(grid(2), repeat=length):
            total += chance * (len(outcome(p, draft, [[coin] for coin in coins])) - 1)
    assert total == Fraction(expected)


def test_one_hot_siblings_accept_the_sum_of_their_probabilities() -> None:
    """p = (1/2, 1/4, 1/4) with children 2 then 0: 1/4, then 2/3 of the rest, and token 1 is left."""
    p, draft, counts = [0.5, 0.25, 0.25], tree([2, 0], [ROOT, ROOT]), np.zeros((2, 3))
    for coins in product(grid(4), grid(3)):
        token, node = outcome(p, draft, [coins, (0.5,)])[0]
        counts[int(node == ROOT), token] += 1 / 12
    np.testing.assert_allclose(counts, [[0.5, 0, 0.25], [0, 0.25, 0]], atol=1e-9)


@pytest.mark.parametrize("conditional", [True, False])
def test_siblings_drawn_without_replacement_keep_the_distribution(conditional: bool) -> None:
    """Every ordered pair of drafts, every coin; whether or not q of the second leaves out the first."""
    p, q, outputs = [0.2, 0.5, 0.3], np.array([0.5, 0.3, 0.2]), np.zeros(3)
    for first, second in permutations(range(3), 2):
        rest = np.where(np.arange(3) == first, 0, q) / (1 - q[first])
        draft = tree([first, second], [ROOT, ROOT], [q, rest if conditional else q])
        for coins in product(grid(5), grid(6)):
            token, _ = outcome(p, draft, [coins, (0.5,)])[0]
            outputs[token] += q[first] * rest[second] / 30
    np.testing.assert_allclose(outputs, p, atol=1e-9)


# ---- bad q


@pytest.mark.parametrize(
    "bad",
    [
        [np.nan, 0.5, 0.5],
        [np.inf, 0.0, 0.0],
        [0.5, np.inf, 0.5],
        [-0.5, 1.0, 0.5],
        [0.5, 0.3, 0.1],
        [2.0, 2.0, 2.0],
        [0.0, 0.5, 0.5],
        [0.0, 0.0, 0.0],
    ],
)
def test_a_bad_q_rejects_and_leaves_the_target_alone(bad: list[float]) -> None:
    """Coins that would accept anything, and the output still has the law of p."""
    p = [0.2, 0.5, 0.3]
    draft = tree([0, 1], [ROOT, ROOT], [bad, [0, 0.6, 0.4]])
    drawn = [outcome(p, draft, [[1e-9, 1e-9]], draw)[0] for draw in grid(10)]
    assert drawn == [(token, ROOT) for token in [0] * 2 + [1] * 5 + [2] * 3]


def test_a_q_that_equals_p_accepts_always() -> None:
    p = np.array([0.2, 0.5, 0.3])
    for token, coin in product(range(3), (1e-9, 1 - 1e-6)):
        assert outcome(p, chain([token], [p]), [[coin]])[0] == (token, 0)


# ---- the walk


def test_the_first_draft_token_is_checked() -> None:
    """[1, 1, 1] with a draft of [1], where the target wants 2."""
    sampler = Sampler(SamplingParams(temperature=0.0), [1, 1, 1], (), 3, seed=0)
    argmax = np.array([2, 0], np.int32)
    assert list(walk(chain([1]), sampler, argmax, None, 3)) == [(2, ROOT)]


def test_greedy_walk_follows_the_tree_and_ends_with_the_targets_token() -> None:
    draft = tree([4, 5, 6, 7, 8], [ROOT, ROOT, 1, 1, 3])
    sampler = Sampler(SamplingParams(temperature=0.0), (), (), 10, seed=0)
    argmax = np.array([5, 0, 7, 0, 8, 9], np.int32)
    assert list(walk(draft, sampler, argmax, None, 0)) == [(5, 1), (7, 3), (8, 4), (9, ROOT)]


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_greedy_is_the_same_walk_under_both_rules(verification: str) -> None:
    params = SamplingParams.from_mapping(
        {"temperature": 0.0, "presence_penalty": 0.5, "verification": verification}
    )
    sampler = Sampler(params, (), (), 3, seed=0)
    rows = np.array([[2.0, 1.9, 0], [2.0, 1.9, 0], [2.0, 1.9, 0]], np.float32)
    assert list(walk(chain([0, 1]), sampler, np.zeros(3, np.int32), rows, 0)) == [(0, 0), (1, 1), (0, ROOT)]


def test_a_consumer_that_stops_has_committed_what_it_took() -> None:
    """Accepted block [10, 11, STOP, 20, 21, 22]: after the stop nothing is sampled, nothing advances."""
    stop, block = 3, [10, 11, 3, 20, 21, 22]
    sampler = Sampler(SamplingParams(temperature=0.0), (), (stop,), 30, seed=0)
    argmax = np.array([*block, 25], np.int32)
    taken = []
    for token, _ in walk(chain(block), sampler, argmax, None, 0):
        taken.append(token)
        if token == stop:
            break
    assert taken == [10, 11, stop]
    assert sampler.generated == 3
    rest = Sampler(SamplingParams(temperature=0.0), (), (stop,), 30, seed=0)
    capped = [
        token for (token, _), _ in zip(walk(chain(block), rest, argmax, None, 0), range(5), strict=False)
    ]
    assert capped == block[:5]


def test_rows_beyond_the_last_token_are_never_looked_at() -> None:
    rows = np.array([[0.0, 9.0, 0.0], [np.nan, np.nan, np.nan]], np.float32)
    sampler = Sampler(SamplingParams(temperature=0.01), (), (), 3, seed=0)
    assert list(walk(chain([2]), sampler, np.zeros(2, np.int32), rows, 0)) == [(1, ROOT)]


def test_a_draft_without_logits_of_a_needy_sampler_is_our_bug() -> None:
    for params in (SamplingParams(), REJECTION):
        with pytest.raises(AssertionError, match="needs_logits"):
            next(walk(chain([0]), Sampler(params, (), (), 3, seed=0), np.zeros(2, np.int32), None, 0))


# ---- coupled: the same tokens

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 2, 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.1]),
    min_tokens=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.6]),
    presence_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([{}, {1: -100.0}, {0: 1.0, 6: -1.0}]),
)
VOCABULARY = 8


def random_guess(seed: int, mode: str, plain: Sequence[int], prompt_length: int) -> Guess:
    """Trees that mix the right continuation with wrong tokens, or only one of the two."""

    def guess(history: tuple[int, ...]) -> Draft:
        random = np.random.default_rng([seed, len(history)])
        right = list(plain[len(history) - prompt_length :])
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for node in range(int(random.integers(0, 17))):
            parent = int(random.integers(-1, node)) if mode == "tree" else node - 1
            depth = 0 if parent == ROOT else depths[parent] + 1
            hit = mode != "adversary" and depth < len(right) and random.random() < 0.7
            token = right[depth] if hit else int(random.integers(VOCABULARY))
            if mode == "adversary" and depth < len(right) and token == right[depth]:
                token = (token + 1) % VOCABULARY
            siblings = [tokens[i] for i in range(node) if parents[i] == parent]
            while token in siblings and len(siblings) < VOCABULARY:
                token = (token + 1) % VOCABULARY
            if token in siblings:
                break
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return tree(tokens, parents)

    return guess


@given(
    PARAMS,
    st.integers(-(2**63), 2**64 - 1),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
    st.sampled_from(["tree", "chain", "adversary"]),
    st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=400, deadline=None)
def test_coupled_text_is_the_plain_text_token_by_token(
    params: SamplingParams, seed: int, prompt: list[int], mode: str, rounding: float
) -> None:
    def run(guess: Guess) -> tuple[list[int], list[int]]:
        return decode(
            params, prompt, guess, length=24, vocab_size=VOCABULARY, seed=seed, stops=(3,), rounding=rounding
        )

    plain, steps = run(nothing)
    assert steps == [1] * 24
    drafted, steps = run(random_guess(seed & 0xFFFF, mode, plain, len(prompt)))
    assert drafted == plain
    assert min(steps) >= 1


def test_a_right_draft_is_kept_whole() -> None:
    params = SamplingParams(temperature=1.2, top_p=0.9, frequency_penalty=0.3)
    plain, _ = decode(params, [1], nothing, length=25, vocab_size=VOCABULARY, seed=7)

    def oracle(history: tuple[int, ...]) -> Draft:
        return chain(plain[len(history) - 1 :][:4])

    drafted, steps = decode(params, [1], oracle, length=25, vocab_size=VOCABULARY, seed=7)
    assert drafted == plain
    assert steps == [5] * 5


# ---- both rules: the right distribution over whole texts

TRUNCATIONS = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.2},
    "penalties": {"frequency_penalty": 0.7, "repetition_penalty": 1.4, "logit_bias": {2: 0.8}},
    "all": {"temperature": 1.4, "top_k": 3, "top_p": 0.9, "min_p": 0.15, "presence_penalty": 0.5},
}
SMALL, PROMPT, TRIALS = 4, (1, 2), 1000


def exact_texts(params: SamplingParams) -> NDArray[np.float64]:
    """[vocab, vocab, vocab] probabilities of the next three tokens."""
    law = np.zeros((SMALL,) * 3)
    for a, b, c in product(range(SMALL), repeat=3):
        sampler, chance, history = Sampler(params, PROMPT, (), SMALL, seed=0), 1.0, list(PROMPT)
        for token in (a, b, c):
            chance *= sampler.distribution(logits_after(tuple(history), SMALL))[token]
            sampler.advance(token)
            history.append(token)
        law[a, b, c] = chance
    return law


@cache
def drafter_law(history: tuple[int, ...]) -> NDArray[np.float64]:
    """[vocab] what the drafter thinks: related to the target, and wrong."""
    wrong = np.random.default_rng([*history, 99]).normal(0, 1, SMALL)
    weights = np.exp(0.6 * logits_after(history, SMALL) + wrong)
    return np.asarray(weights / weights.sum())


def draw(random: np.random.Generator, q: NDArray[np.float64], count: int = 1) -> list[int]:
    """`count` draws from q without replacement, in the order of the draws (Gumbel top-k)."""
    return np.argsort(-(np.log(q) + random.gumbel(size=len(q))))[:count].tolist()


def greedy_chain(random: np.random.Generator) -> Guess:
    def guess(history: tuple[int, ...]) -> Draft:
        tokens: list[int] = []
        for _ in range(2):
            tokens.append(int(drafter_law((*history, *tokens)).argmax()))
        return chain(tokens)

    return guess


def greedy_tree(random: np.random.Generator) -> Guess:
    def guess(history: tuple[int, ...]) -> Draft:
        first, second = np.argsort(-drafter_law(history))[:2].tolist()
        below = [drafter_law((*history, token)).argsort()[::-1] for token in (first, second)]
        return tree([first, second, below[0][0], below[1][0], below[0][1]], [ROOT, ROOT, 0, 1, 0])

    return guess


def sampled_chain(random: np.random.Generator) -> Guess:
    def guess(history: tuple[int, ...]) -> Draft:
        tokens: list[int] = []
        laws = []
        for _ in range(2):
            laws.append(drafter_law((*history, *tokens)))
            tokens += draw(random, laws[-1])
        return chain(tokens, laws)

    return guess


def sampled_tree(random: np.random.Generator) -> Guess:
    """Two siblings without replacement at each of two levels, q given as the law of the first draw."""

    def guess(history: tuple[int, ...]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        laws = []
        for parent in (ROOT, 0):
            q = drafter_law((*history, *tokens[:1]))
            tokens += draw(random, q, 2)
            parents += [parent, parent]
            laws += [q, q]
        return tree(tokens, parents, laws)

    return guess


Shape = Callable[[np.random.Generator], Guess]


def text_counts(params: SamplingParams, shape: Shape | None, trials: int = TRIALS) -> NDArray[np.float64]:
    """[vocab, vocab, vocab] how often each three-token text was written, over seeds."""
    guess = nothing if shape is None else shape(np.random.default_rng(1234))
    counts = np.zeros((SMALL,) * 3)
    for seed in range(trials):
        text, _ = decode(params, PROMPT, guess, length=3, vocab_size=SMALL, seed=seed)
        counts[tuple(text)] += 1
    return counts


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("shape", [None, greedy_chain, greedy_tree])
def test_coupled_texts_have_the_targets_distribution(truncation: str, shape: Shape | None) -> None:
    params = SamplingParams.from_mapping(TRUNCATIONS[truncation])
    assert chi_square_fits(text_counts(params, shape, 500), exact_texts(params))


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("shape", [greedy_tree, sampled_chain, sampled_tree])
def test_rejection_texts_have_the_targets_distribution(truncation: str, shape: Shape) -> None:
    params = SamplingParams.from_mapping({**TRUNCATIONS[truncation], "verification": "rejection"})
    assert chi_square_fits(text_counts(params, shape), exact_texts(params))


# ---- wrong variants must fail the same test


def test_resampling_from_p_after_a_rejection_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_residual", lambda p, q: p)
    for shape in (greedy_chain, sampled_chain):
        assert not chi_square_fits(text_counts(REJECTION, shape), exact_texts(REJECTION))


def test_claiming_another_q_than_the_sampled_one_fails() -> None:
    """Drafts drawn at half the temperature, q reported as if they were not."""

    def raw(random: np.random.Generator) -> Guess:
        def guess(history: tuple[int, ...]) -> Draft:
            q = drafter_law(history)
            sharp = q**3 / (q**3).sum()
            return chain(draw(random, sharp), [q])

        return guess

    assert not chi_square_fits(text_counts(REJECTION, raw), exact_texts(REJECTION))


def test_sampled_siblings_taken_for_certain_ones_fail() -> None:
    """One-hot verification of drafts drawn at random is sound; accepting them by p / q of 1 is not."""

    def forgetful(random: np.random.Generator) -> Guess:
        sampled = sampled_tree(random)

        def guess(history: tuple[int, ...]) -> Draft:
            draft = sampled(history)
            return tree(draft.tokens, draft.parents)

        return guess

    def flattering(random: np.random.Generator) -> Guess:
        sampled = sampled_tree(random)

        def guess(history: tuple[int, ...]) -> Draft:
            draft = sampled(history)
            return tree(draft.tokens, draft.parents, np.full((len(draft), SMALL), 1 / SMALL))

        return guess

    assert chi_square_fits(text_counts(REJECTION, forgetful), exact_texts(REJECTION))
    assert not chi_square_fits(text_counts(REJECTION, flattering), exact_texts(REJECTION))


def test_sampling_again_after_a_mismatch_fails() -> None:
    """Accept if equal to the target's sample is exact only if that very sample is written on a mismatch."""
    params, guess = SamplingParams(), greedy_chain(np.random.default_rng(0))
    right, wrong = np.zeros(SMALL), np.zeros(SMALL)
    row = logits_after(PROMPT, SMALL)
    drafted = int(guess(PROMPT).tokens[0])
    for seed in range(TRIALS):
        sampler = Sampler(params, PROMPT, (), SMALL, seed)
        token = sampler.pick(row, 0, len(PROMPT))
        right[token] += 1
        wrong[token if token == drafted else sampler.pick(row, 0, 10_000)] += 1
    expected = Sampler(params, PROMPT, (), SMALL, 0).distribution(row)
    assert chi_square_fits(right, expected)
    assert not chi_square_fits(wrong, expected)


def test_accepting_the_first_draft_unchecked_fails() -> None:
    def shifted(random: np.random.Generator) -> Guess:
        inner = greedy_chain(random)
        return lambda history: chain(inner(history).tokens[:1])

    guess = shifted(np.random.default_rng(0))
    counts = np.zeros((SMALL,) * 3)
    for seed in range(1000):
        history = [*PROMPT, int(guess(PROMPT).tokens[0])]
        text, _ = decode(SamplingParams(), history, guess, length=2, vocab_size=SMALL, seed=seed)
        counts[(history[-1], *text)] += 1
    assert not chi_square_fits(counts, exact_texts(SamplingParams()))
