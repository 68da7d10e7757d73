"""Cases that other engines got wrong. X-numbers name the case; each runs with every drafter and length."""

from __future__ import annotations

import pytest

from paceline.core import Completion, SamplingParams
from paceline.errors import RequestError
from support.drafters import Adversary, Oracle, SyntheticAcceptance, following
from support.engines import (
    DRAFTERS,
    GREEDY,
    RULE,
    TOKENIZER,
    drafter_for,
    engine_for,
    finish,
    run,
    same,
    submit,
)
from support.planners import FixedPlanner
from support.stub_target import FixedRule, RandomRule, Rule, ScriptedRule, greedy
from support.tiny_tokenizer import EOS, VOCAB_SIZE

LENGTHS = (1, 2, 4, 8, 16)
every_draft = pytest.mark.parametrize(
    ("name", "length"),
    [(name, length) for name in DRAFTERS for length in (LENGTHS if name != "none" else (1,))],
)
PROMPT = list(b"the cat sat on the mat and the cat")


def planner_for(name: str, length: int, prompt: list[int], plain: Completion) -> FixedPlanner:
    return FixedPlanner(drafter_for(name, [*prompt, *plain.tokens]), length)


def check(
    rule: Rule, prompt: list[int], params: SamplingParams, name: str, length: int, **target: int
) -> Completion:
    """Run plain and with the drafter, expect the same, return the plain result."""
    plain = run(engine_for(rule, **target), prompt, params)
    truth = run(
        engine_for(rule, **target), prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    )
    planner = FixedPlanner(drafter_for(name, [*prompt, *truth.tokens]), length)
    same(plain, run(engine_for(rule, **target), prompt, params, planner, prediction=truth.tokens))
    return plain


def scripted(text: bytes | list[int], prompt: list[int], after: int = EOS) -> ScriptedRule:
    return ScriptedRule(VOCAB_SIZE, list(text), start=len(prompt), after=after)


def test_plain_decoding_is_the_rule_itself() -> None:
    for rule in (RULE, RandomRule(VOCAB_SIZE, seed=5)):
        assert run(engine_for(rule), PROMPT, GREEDY).tokens == greedy(rule, PROMPT, 32)


@every_draft
def test_x2_prompt_of_one_token(name: str, length: int) -> None:
    plain = check(RULE, [7], GREEDY, name, length)
    assert plain.tokens == greedy(RULE, [7], 32)


@every_draft
def test_x3_max_tokens_one_and_zero(name: str, length: int) -> None:
    one = check(RULE, PROMPT, SamplingParams(temperature=0, max_tokens=1), name, length)
    assert (len(one.tokens), one.finish_reason) == (1, "length")
    none = check(RULE, PROMPT, SamplingParams(temperature=0, max_tokens=0), name, length)
    assert (none.tokens, none.text, none.finish_reason) == ([], "", "length")


def test_x3_max_tokens_zero_takes_no_pass() -> None:
    engine = engine_for()
    request = submit(engine, PROMPT, SamplingParams(temperature=0, max_tokens=0))
    assert request.over
    assert engine.idle
    assert [chunk.finish_reason for chunk in request.chunks] == ["length"]


@every_draft
def test_x4_no_more_tokens_than_asked(name: str, length: int) -> None:
    prompt = list(b"abcabcab")
    rule = scripted(b"cabcabcabcabcabcabc", prompt)
    plain = check(rule, prompt, SamplingParams(temperature=0, max_tokens=2), name, length)
    assert plain.text == "ca"


@every_draft
@pytest.mark.parametrize(("prompt_length", "expected"), [(120, 8), (126, 2), (127, 1)])
def test_x5_context_limit(name: str, length: int, prompt_length: int, expected: int) -> None:
    prompt = (PROMPT * 4)[:prompt_length]
    params = SamplingParams(temperature=0, max_tokens=64)
    plain = check(RULE, prompt, params, name, length, context_limit=128, pages=16)
    assert (len(plain.tokens), plain.finish_reason) == (expected, "length")


@pytest.mark.parametrize("prompt_length", [128, 129, 500])
def test_x5_prompt_too_long_names_both_numbers(prompt_length: int) -> None:
    engine = engine_for(context_limit=128)
    with pytest.raises(RequestError, match=rf"{prompt_length} tokens.*limit is 128") as caught:
        submit(engine, [1] * prompt_length)
    assert "127" in caught.value.hint
    assert len(run(engine, PROMPT).tokens) == 32


def test_x5_long_run_to_the_context_limit() -> None:
    """Every position up to the limit, with pages for exactly one such sequence."""
    for name in DRAFTERS:
        for length in (3, 16):
            plain = run(engine_for(context_limit=512, pages=64), PROMPT, SamplingParams(temperature=0))
            planner = planner_for(name, length, PROMPT, plain)
            engine = engine_for(context_limit=512, pages=64)
            same(plain, run(engine, PROMPT, SamplingParams(temperature=0), planner, plain.tokens))
            assert len(plain.tokens) == 512 - len(PROMPT)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("step", range(12))
def test_x7_stop_token_inside_an_accepted_block(name: str, step: int) -> None:
    tokens = greedy(RULE, PROMPT, 40)
    stop = tokens[step]
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop])
    plain = check(RULE, PROMPT, params, name, 8)
    assert plain.tokens == tokens[: tokens.index(stop) + 1]
    assert (plain.finish_reason, plain.stop_reason) == ("stop", stop)
    assert plain.text == TOKENIZER.decode(plain.tokens[:-1])


@every_draft
def test_x8_the_earlier_event_wins(name: str, length: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    first = check(scripted([10, 11, EOS, 20, 21, 22], [1, 2]), [1, 2], params, name, length)
    assert (first.tokens, first.finish_reason, first.stop_reason) == ([10, 11, EOS], "stop", None)
    second = check(scripted([10, 11, 20, 21, 22, EOS], [1, 2]), [1, 2], params, name, length)
    assert (second.tokens, second.finish_reason) == ([10, 11, 20, 21, 22], "length")


def test_x8_a_stop_at_the_cap_is_a_stop() -> None:
    rule = scripted([10, 11, EOS, 20], [1, 2])
    done = run(engine_for(rule), [1, 2], SamplingParams(temperature=0, max_tokens=3))
    assert (done.tokens, done.finish_reason) == ([10, 11, EOS], "stop")


def test_ignore_eos_writes_on() -> None:
    rule = scripted([10, EOS, 20, 21], [1, 2])
    done = run(engine_for(rule), [1, 2], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert (done.tokens, done.finish_reason) == ([10, EOS, 20, 21], "length")


@every_draft
def test_x9_penalties_count_every_token_of_a_block(name: str, length: int) -> None:
    a, b = ord("A"), ord("B")
    logits = [-1e9] * VOCAB_SIZE
    logits[a], logits[b] = 2.0, 1.0
    expected = list(b"AABABABABABA")
    params = SamplingParams(temperature=0, max_tokens=12, frequency_penalty=0.6)
    plain = run(engine_for(FixedRule(logits)), [1, 2], params)
    assert plain.tokens == expected
    planner = planner_for(name, length, [1, 2], plain)
    same(plain, run(engine_for(FixedRule(logits)), [1, 2], params, planner, expected))


@every_draft
def test_min_tokens_counts_tokens_not_passes(name: str, length: int) -> None:
    """The script ends at once; five tokens must come first, and EOS is allowed exactly as the sixth."""
    rule = scripted([EOS] * 20, [1, 2])
    plain = check(rule, [1, 2], SamplingParams(temperature=0, max_tokens=20, min_tokens=5), name, length)
    assert len(plain.tokens) == 6
    assert EOS not in plain.tokens[:5]
    assert plain.tokens[5] == EOS


@every_draft
@pytest.mark.parametrize("script", [[*b"ab E", ord("N"), ord("D"), *b" cd"], None])
def test_x11_stop_string_over_several_tokens(name: str, length: int, script: list[int] | None) -> None:
    merged = TOKENIZER.encode("EN", add_special=False)
    assert len(merged) == 1
    ids = script if script is not None else [*b"ab ", *merged, ord("D"), *b" cd"]
    params = SamplingParams(temperature=0, max_tokens=20, stop=["END"], logprobs=1)
    plain = check(scripted(ids, PROMPT), PROMPT, params, name, length)
    assert (plain.text, plain.finish_reason, plain.stop_reason) == ("ab ", "stop", "END")
    upto = ids.index(ord("D")) + 1
    assert plain.tokens == ids[:upto]  # the tokens that spell the stop string count, with their logprobs
    assert plain.logprobs is not None
    assert [entry.token for entry in plain.logprobs] == plain.tokens


@every_draft
def test_x11_streamed_text_never_shows_part_of_a_stop_string(name: str, length: int) -> None:
    rule = scripted(b"abEN ENcdENDef", PROMPT)
    params = SamplingParams(temperature=0, max_tokens=20, stop=["END"])
    engine = engine_for(rule)
    truth = [*PROMPT, *b"abEN ENcdENDef"]
    request = submit(engine, PROMPT, params, FixedPlanner(drafter_for(name, truth), length), truth)
    finish(engine, request)
    seen = ""
    for chunk in request.chunks:
        seen += chunk.text
        assert "abEN ENcd".startswith(seen)
    assert seen == "abEN ENcd"


@every_draft
def test_x12_of_several_stop_strings_the_first_to_complete_wins(name: str, length: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, stop=["a", "is", ","])
    plain = check(scripted(b" The user is a, b", PROMPT), PROMPT, params, name, length)
    assert (plain.text, plain.stop_reason) == (" The user ", "is")


@every_draft
def test_x13_characters_over_several_tokens(name: str, length: int) -> None:
    text = "a😀b漢字c"
    ids = TOKENIZER.encode(text, add_special=False)
    assert len(ids) == 3 + 2 + 6  # two tokens for the emoji's four bytes, one per byte of the rest
    rule = scripted([*ids, EOS], PROMPT)
    engine = engine_for(rule)
    planner = FixedPlanner(drafter_for(name, [*PROMPT, *ids]), length)
    request = submit(engine, PROMPT, GREEDY, planner, ids)
    (done,) = finish(engine, request)
    assert done.text == text
    assert "".join(chunk.text for chunk in request.chunks) == text
    assert all("\ufffd" not in chunk.text for chunk in request.chunks)


def test_x13_output_cut_inside_a_character_ends_in_one_replacement() -> None:
    rule = scripted("a漢".encode(), PROMPT)
    done = run(engine_for(rule), PROMPT, SamplingParams(temperature=0, max_tokens=3))
    assert done.text == "a\ufffd"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_x21_self_draft_is_accepted_whole(temperature: float, length: int) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=500, ignore_eos=True)
    rule = RandomRule(VOCAB_SIZE, seed=8)
    target = {"context_limit": 600, "pages": 100}
    plain = run(engine_for(rule, **target), PROMPT, params)
    truth = dict(enumerate([*PROMPT, *plain.tokens]))
    planner = FixedPlanner(Oracle(lambda history: truth.get(len(history))), length)
    done = run(engine_for(rule, **target), PROMPT, params, planner)
    same(plain, done)
    stats = done.speculation
    assert stats.accepted == stats.drafted
    assert stats.committed == 499
    assert stats.passes == -(-499 // (length + 1))
    full, rest = divmod(499, length + 1)
    last = max(rest - 1, 0)  # the pass that reaches the cap drafts only what it may keep
    assert stats.accepted_per_position == [full + (i < last) for i in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_x22_always_wrong_draft(length: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    plain = run(engine_for(), PROMPT, params)
    engine = engine_for()
    planner = FixedPlanner(Adversary(following([*PROMPT, *plain.tokens]), VOCAB_SIZE), length)
    done = run(engine, PROMPT, params, planner)
    same(plain, done)
    assert engine.target.passes == 200  # type: ignore[attr-defined]
    stats = done.speculation
    assert (stats.accepted, stats.passes, stats.committed) == (0, 199, 199)
    assert stats.accepted_per_position == []
    assert set(done.token_sources) == {""}


@pytest.mark.parametrize("name", DRAFTERS)
def test_x25_identical_requests_side_by_side(name: str) -> None:
    plain = run(engine_for(), PROMPT, GREEDY)
    engine = engine_for()
    requests = [
        submit(engine, PROMPT, GREEDY, planner_for(name, 4, PROMPT, plain), plain.tokens) for _ in range(4)
    ]
    done = finish(engine, *requests)
    for one in done:
        same(plain, one)
        assert one.speculation == done[0].speculation


@pytest.mark.parametrize("name", DRAFTERS)
def test_x25_seeds_side_by_side(name: str) -> None:
    rule = RandomRule(VOCAB_SIZE, seed=2)
    params = [SamplingParams(seed=seed, max_tokens=24) for seed in (1, 2, 3, 4)]
    prompts = [PROMPT[: 5 + i] for i in range(4)]
    alone = [run(engine_for(rule), p, its) for p, its in zip(prompts, params, strict=True)]
    engine = engine_for(rule)
    requests = [
        submit(engine, p, its, planner_for(name, 4, p, one), one.tokens)
        for p, its, one in zip(prompts, params, alone, strict=True)
    ]
    for one, other in zip(alone, finish(engine, *requests), strict=True):
        same(one, other)
    assert len({tuple(one.tokens) for one in alone}) == 4


class Prescribed(SyntheticAcceptance):
    """Right for the first `accepted[i]` of three guesses in its i-th draft."""

    def __init__(self, truth: list[int], accepted: list[int]) -> None:
        super().__init__(following(truth), (1.0, 1.0, 1.0), VOCAB_SIZE)
        self.script = iter(accepted)

    def draft(self, context, budget):  # type: ignore[no-untyped-def]
        right = super().draft(context, budget)
        kept = next(self.script)
        right.tokens[kept:] = [(token + 1) % VOCAB_SIZE for token in right.tokens[kept:]]
        return right


def test_x26_statistics() -> None:
    accepted = [0] * 5 + [1] * 2 + [3] * 3
    tokens = 1 + sum(accepted) + len(accepted)
    params = SamplingParams(temperature=0, max_tokens=tokens + 3)
    truth = [*PROMPT, *greedy(RULE, PROMPT, tokens + 4)]
    engine = engine_for()
    request = submit(engine, PROMPT, params, FixedPlanner(Prescribed(truth, accepted), 3))
    while request.stats.passes < 10:
        engine.step()
        assert not request.over
    stats = request.stats
    assert (stats.passes, stats.drafts, stats.accepted, stats.drafted, stats.committed) == (
        10,
        10,
        11,
        30,
        21,
    )
    assert stats.accepted_per_position == [5, 3, 3]
    assert stats.acceptance_rate == pytest.approx(0.3667, abs=1e-4)
    assert stats.mean_acceptance_length == pytest.approx(2.1)
    assert (stats.by_drafter["synthetic"].drafted, stats.by_drafter["synthetic"].accepted) == (30, 11)


def test_accepted_counts_only_what_was_kept() -> None:
    """A block that is right as a whole, but the text ends inside it."""
    rule = scripted([10, 11, EOS, 20, 21], [1, 2])
    truth = [1, 2, 10, 11, EOS, 20, 21]
    done = run(engine_for(rule), [1, 2], GREEDY, FixedPlanner(Oracle(following(truth)), 4))
    stats = done.speculation
    assert done.tokens == [10, 11, EOS]
    assert (stats.passes, stats.drafted, stats.accepted, stats.committed) == (1, 4, 2, 2)
    assert done.token_sources == ["", "oracle", "oracle"]


def test_logprobs_of_accepted_tokens_are_those_of_plain_decoding() -> None:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=30, logprobs=2, ignore_eos=True)
    plain = run(engine_for(), PROMPT, params)
    planner = FixedPlanner(Oracle(following([*PROMPT, *plain.tokens])), 8)
    done = run(engine_for(), PROMPT, params, planner)
    assert done.speculation.accepted > 20
    assert done.logprobs == plain.logprobs
    assert plain.logprobs is not None
    assert all(entry.logprob < 0 and len(entry.top) == 2 for entry in plain.logprobs)
