"""The arithmetic behind the published ratios."""

from __future__ import annotations

from harness.ratios import best_of, compare, fastest

from paceline.core import SpeculationStats
from paceline.tools.statistics import Sample

PLAIN, AUTO = "paceline off", "paceline auto"
ARMS = [PLAIN, AUTO, "llama plain", "llama simple", "llama mod"]


def answer(
    arm: str,
    prompt: str,
    tokens: int,
    decode_s: float,
    *,
    category: str = "qa",
    passes: int = 0,
    drafted: int = 0,
) -> Sample:
    """An answer whose `tokens` come after the first one."""
    stats = SpeculationStats(passes=passes, drafted=drafted, accepted=tokens - passes, committed=tokens)
    return Sample(
        arm=arm,
        prompt=prompt,
        category=category,
        prompt_tokens=10,
        completion_tokens=tokens + 1,
        decode_s=decode_s,
        first_token_s=0.1,
        speculation=stats if passes else None,
    )


def test_the_fastest_of_repeated_answers_counts_for_each_arm_and_prompt() -> None:
    slow, quick = answer(AUTO, "a", 100, 2.0), answer(AUTO, "a", 100, 1.0)
    other_prompt, other_arm = answer(AUTO, "b", 100, 3.0), answer(PLAIN, "a", 100, 4.0)
    assert fastest([slow, other_prompt, quick, other_arm]) == [quick, other_prompt, other_arm]


def test_fastest_is_by_time_per_token_not_by_time() -> None:
    short, long = answer("llama plain", "a", 10, 0.5), answer("llama plain", "a", 100, 1.0)
    assert fastest([short, long]) == [long]


def test_speeds_are_totals_over_totals() -> None:
    samples = [answer(PLAIN, "a", 100, 1.0), answer(PLAIN, "b", 20, 1.0)]
    samples += [answer(AUTO, "a", 100, 0.4), answer(AUTO, "b", 20, 0.8)]
    overall = compare(samples, {"a": "set", "b": "set"}, plain=PLAIN, ours=AUTO, arms=ARMS)["overall"]
    assert overall.speed == {PLAIN: 60.0, AUTO: 120 / 1.2000000000000002}
    assert overall.over_plain == overall.speed[AUTO] / 60.0
    assert overall.tokens == {PLAIN: 122, AUTO: 122, "llama plain": 0, "llama simple": 0, "llama mod": 0}
    assert overall.prompts == 2
    assert overall.peers == {}


def test_a_peers_best_is_chosen_for_each_set_and_its_plain_is_compared_with_our_plain() -> None:
    samples = []
    for prompt, simple_s, mod_s in (("a", 1.0, 2.0), ("b", 4.0, 2.0)):
        samples += [answer(PLAIN, prompt, 100, 2.0), answer(AUTO, prompt, 100, 0.5)]
        samples += [answer("llama plain", prompt, 100, 3.0)]
        samples += [answer("llama simple", prompt, 100, simple_s), answer("llama mod", prompt, 100, mod_s)]
    found = compare(samples, {"a": "chat", "b": "code"}, plain=PLAIN, ours=AUTO, arms=ARMS)
    chat, code, overall = (found[name].peers["llama"] for name in ("chat", "code", "overall"))
    assert (chat.name, chat.speed, chat.ratio) == ("llama simple", 100.0, 2.0)
    assert (code.name, code.speed, code.ratio) == ("llama mod", 50.0, 4.0)
    assert (overall.name, overall.speed, overall.ratio) == ("llama mod", 50.0, 4.0)
    assert chat.plain_ratio == 1.5


def test_groups_come_in_order_and_a_set_of_one_category_is_not_shown_twice() -> None:
    samples = [answer(PLAIN, "a", 9, 1.0, category="qa"), answer(PLAIN, "b", 9, 1.0, category="edits")]
    found = compare(samples, {"a": "chat", "b": "edits"}, plain=PLAIN, ours=AUTO, arms=[PLAIN])
    assert list(found) == ["overall", "chat", "edits", "qa"]
    assert found["edits"].prompts == 1
    assert found["qa"].over_plain is None


def test_acceptance_is_of_our_speculating_arm_alone() -> None:
    samples = [
        answer(AUTO, "a", 12, 1.0, passes=4, drafted=16),
        answer(AUTO, "b", 8, 1.0, passes=6, drafted=4),
    ]
    samples += [answer("llama mod", "a", 100, 1.0, passes=1, drafted=400)]
    overall = compare(samples, {"a": "s", "b": "s"}, plain=PLAIN, ours=AUTO, arms=ARMS)["overall"]
    assert overall.tokens_per_pass == 2.0
    assert overall.acceptance == 0.5


def test_the_best_of_a_peer_that_was_not_measured_is_none() -> None:
    assert best_of({"llama plain": 3.0, "llama mod": 4.0, AUTO: 9.0}, "llama") == "llama mod"
    assert best_of({AUTO: 9.0}, "openvino") is None
