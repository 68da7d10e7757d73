"""The Python API, over a stub target and a real tokenizer."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import paceline
from paceline import LLM, RequestError, SamplingParams, UsageError
from paceline.core import Completion
from paceline.planning.pass_time import PassTime
from paceline.text.template import ChatTemplate
from support.stub_target import RandomRule, RepetitiveRule, Rule, ScriptedRule, StubTarget, greedy
from support.tiny_tokenizer import BOS, EOS, VOCAB_SIZE, metadata, tiny_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
RULE = RepetitiveRule(VOCAB_SIZE, peak=6.0)
PROMPT = "abcabcabcabc"


def llm_for(
    rule: Rule = RULE, *, bos: bool = True, target: dict[str, Any] | None = None, **options: Any
) -> LLM:
    options.setdefault("pass_time", PassTime({1: 1e-3, 64: 1e-3}))
    return LLM.from_target(StubTarget(rule, **(target or {})), tiny_tokenizer(bos=bos), **options)


def idle(llm: LLM) -> bool:
    llm.engine.cache.check_integrity()
    return llm.engine.idle and llm.engine.cache.available == llm.engine.cache.pages


def test_text_prompt_is_tokenised_and_answered() -> None:
    llm = llm_for()
    done = llm.generate(PROMPT, GREEDY)
    ids = [BOS, *PROMPT.encode()]
    assert llm.tokenize(PROMPT) == ids
    assert done.tokens == greedy(RULE, ids, 24)
    assert done.text == llm.detokenize(done.tokens)
    assert done.prompt_tokens == len(ids)
    assert done.finish_reason == "length"
    assert done.timings.prefill_s > 0
    assert done.timings.decode_s > 0
    assert done.timings.time_to_first_token_s >= done.timings.prefill_s


def test_token_ids_are_taken_as_they_are() -> None:
    assert llm_for().generate([1, 2, 3], GREEDY).tokens == greedy(RULE, [1, 2, 3], 24)


def test_control_tokens_in_a_text_prompt_count_as_such() -> None:
    assert llm_for(bos=False).tokenize("a</s>b") == [97, EOS, 98]


def test_messages_go_through_the_template() -> None:
    template = ChatTemplate.from_gguf(
        metadata()
        | {"tokenizer.chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"}
    )
    assert template is not None
    llm = llm_for(chat_template=template)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    done = llm.generate([{"role": "user", "content": "hi </s>"}], params)
    assert done.tokens == greedy(RULE, [*b"[user]hi </s>", EOS], 24)


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        llm_for().generate([{"role": "user", "content": "hi"}], GREEDY)


def test_x1_empty_prompt_with_bos_starts_from_bos() -> None:
    for empty in ("", []):
        for speculate in ("off", "auto", "ngram"):
            done = llm_for().generate(empty, GREEDY, speculate=speculate)
            assert done.tokens == greedy(RULE, [BOS], 24)


def test_x1_empty_prompt_without_bos_is_refused_and_the_next_is_served() -> None:
    llm = llm_for(bos=False)
    for empty in ("", []):
        with pytest.raises(RequestError, match="prompt is empty"):
            llm.generate(empty, GREEDY)
    assert llm.generate([1], GREEDY).tokens == greedy(RULE, [1], 24)


@pytest.mark.parametrize(
    "prompt",
    [
        [1, "a"],
        [1.5],
        [True],
        [np.True_],
        7,
        None,
        b"ab",
        bytearray(b"ab"),
        memoryview(b"ab"),
        {"role": "user", "content": "x"},
        [{"role": "user", "content": "x"}, 3],
        ["a", 5],
        ["a", None],
        [[1], b"ab"],
        [[[1]]],
        [VOCAB_SIZE],
        [-1],
        [10**30],
        "\ud800",
    ],
)
def test_prompts_of_no_sensible_type_are_refused(prompt: Any) -> None:
    llm = llm_for()
    with pytest.raises(RequestError):
        llm.generate(prompt, GREEDY)
    assert idle(llm)


@pytest.mark.parametrize(
    "params", [SamplingParams(stop_token_ids=[10**6]), SamplingParams(logit_bias={-1: 1.0})]
)
def test_ids_outside_the_vocabulary_are_refused(params: SamplingParams) -> None:
    with pytest.raises(RequestError, match="outside"):
        llm_for().generate(PROMPT, params)


@pytest.mark.parametrize("prediction", [5, b"ab", ["a"], [1.5], [True], [None], {"a": 1}, [-1], [VOCAB_SIZE]])
def test_predictions_of_no_sensible_type_are_refused(prediction: Any) -> None:
    llm = llm_for()
    with pytest.raises(RequestError, match="the prediction"):
        llm.generate(PROMPT, GREEDY, prediction=prediction)
    assert idle(llm)


def test_a_prediction_may_be_an_array() -> None:
    llm = llm_for()
    text = llm.generate(PROMPT, GREEDY, speculate="off").tokens
    assert llm.generate(PROMPT, GREEDY, prediction=np.array(text)).tokens == text  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [5, "x", {}, {"temperature": 0}, [5], ["x"], [None]])
def test_params_must_be_sampling_params(params: Any) -> None:
    llm = llm_for()
    with pytest.raises(RequestError, match="params is"):
        llm.generate(PROMPT, params)
    with pytest.raises(RequestError, match="params is"):
        llm.stream(PROMPT, params)
    assert idle(llm)


@pytest.mark.parametrize("wrong", [None, 5, [1], b"x"])
def test_only_text_can_be_tokenized(wrong: Any) -> None:
    with pytest.raises(RequestError, match="the text is of type"):
        llm_for().tokenize(wrong)


@pytest.mark.parametrize("wrong", [None, 5, "abc", b"x", [1.5], [True], ["a"], [-1], [10**30]])
def test_only_token_ids_can_be_detokenized(wrong: Any) -> None:
    with pytest.raises(RequestError, match="id"):
        llm_for().detokenize(wrong)


@pytest.mark.parametrize("model", [None, 5, b"smollm2", [1]])
def test_a_model_is_named_by_text_or_path(model: Any) -> None:
    with pytest.raises(UsageError, match="the model is"):
        LLM(model)


def test_several_prompts_come_back_in_order() -> None:
    llm = llm_for()
    prompts = [PROMPT, "xyz", "q"]
    done = llm.generate(prompts, GREEDY)
    assert [one.tokens for one in done] == [llm_for().generate(p, GREEDY).tokens for p in prompts]
    each = [SamplingParams(seed=seed, max_tokens=seed) for seed in (1, 2, 3)]
    done = llm.generate([[1], [2], [3]], each)
    assert [(one.seed, len(one.tokens)) for one in done] == [(1, 1), (2, 2), (3, 3)]
    with pytest.raises(RequestError, match="2 sampling parameters for 1"):
        llm.generate([[1]], each[:2])


def test_n_completions_share_the_prompt_and_use_following_seeds() -> None:
    llm = llm_for(RandomRule(VOCAB_SIZE))
    params = SamplingParams(seed=5, max_tokens=12, n=3)
    done = llm.generate([PROMPT], params)
    assert [one.seed for one in done] == [5, 6, 7]
    assert [one.cached_tokens for one in done] == [0, len(PROMPT), len(PROMPT)]
    for one in done:
        alone = llm_for(RandomRule(VOCAB_SIZE)).generate(PROMPT, SamplingParams(seed=one.seed, max_tokens=12))
        assert one.tokens == alone.tokens
    chunks = list(llm.stream(PROMPT, params))
    assert {chunk.index for chunk in chunks} == {0, 1, 2}
    ends = {chunk.index: chunk.completion for chunk in chunks if chunk.completion}
    assert [ends[i].tokens for i in range(3)] == [one.tokens for one in done]  # type: ignore[union-attr]


@pytest.mark.parametrize("pages", [12, 128])
def test_n_completions_on_a_small_machine(pages: int) -> None:
    llm = llm_for(RandomRule(VOCAB_SIZE), target={"pages": pages, "context_limit": 80})
    done = llm.generate([PROMPT], SamplingParams(seed=1, max_tokens=60, n=6, ignore_eos=True))
    assert [len(one.tokens) for one in done] == [60] * 6
    alone = llm_for(RandomRule(VOCAB_SIZE)).generate(
        PROMPT, SamplingParams(seed=6, max_tokens=60, ignore_eos=True)
    )
    assert done[5].tokens == alone.tokens
    assert idle(llm)


def test_a_seed_is_drawn_reported_and_repeats() -> None:
    llm = llm_for(RandomRule(VOCAB_SIZE))
    params = SamplingParams(max_tokens=10)
    drawn = [llm.generate(PROMPT, params) for _ in range(8)]
    assert len({one.seed for one in drawn}) == 8
    assert len({tuple(one.tokens) for one in drawn}) == 8
    again = llm.generate(PROMPT, SamplingParams(max_tokens=10, seed=drawn[3].seed))
    assert again.tokens == drawn[3].tokens


def test_stream_adds_up_to_the_completion() -> None:
    llm = llm_for()
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=1)
    whole = llm.generate(PROMPT, params)
    chunks = list(llm.stream(PROMPT, params, speculate="ngram:num_speculative_tokens=4"))
    last = chunks[-1].completion
    assert last is not None
    assert [chunk.completion for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert "".join(chunk.text for chunk in chunks) == whole.text == last.text
    assert [t for chunk in chunks for t in chunk.tokens] == whole.tokens
    assert [entry for chunk in chunks for entry in chunk.logprobs or []] == whole.logprobs
    assert [source for chunk in chunks for source in chunk.sources] == last.token_sources
    assert chunks[-1].finish_reason == "length"
    assert len(chunks) < 40  # accepted drafts came several at a time
    assert "ngram" in last.token_sources


def test_a_prediction_is_a_drafter() -> None:
    llm = llm_for(RandomRule(VOCAB_SIZE))
    plain = llm.generate(PROMPT, GREEDY, speculate="off")
    for speculate in ("auto", "ngram"):
        done = llm.generate(PROMPT, GREEDY, speculate=speculate, prediction=plain.tokens)
        assert done.tokens == plain.tokens
        assert done.speculation.by_drafter["prediction"].accepted > 10


def test_a_prediction_may_be_text() -> None:
    rule = ScriptedRule(VOCAB_SIZE, b"hello there, general", start=1 + len(PROMPT), after=EOS)
    done = llm_for(rule).generate(PROMPT, GREEDY, prediction="hello there, general")
    assert done.text == "hello there, general"
    assert done.speculation.accepted > 10


def test_speculation_is_chosen_per_call_and_explains_itself() -> None:
    llm = llm_for()
    off = llm.generate(PROMPT, GREEDY, speculate="off")
    assert (off.speculation.drafted, off.speculation.off_reason) == (0, "speculation is off")
    on = llm.generate(PROMPT, GREEDY, speculate={"method": "ngram", "num_speculative_tokens": 3})
    assert on.tokens == off.tokens
    assert on.speculation.drafted > 0
    assert on.speculation.off_reason is None
    assert set(on.speculation.by_drafter) == {"ngram"}


@pytest.mark.parametrize(
    "speculate", ["ngrm", {"method": "ngram", "mox": 3}, ["off-ish"], {"method": object()}]
)
def test_unknown_drafters_and_options_are_refused(speculate: Any) -> None:
    llm = llm_for()
    with pytest.raises(UsageError):
        llm.generate(PROMPT, GREEDY, speculate=speculate)
    with pytest.raises(UsageError):
        llm_for(speculate=speculate)
    assert idle(llm)


def test_threads_that_come_together_measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(target: object) -> PassTime:
        measured.append(target)
        time.sleep(0.05)  # long enough for all the others to arrive
        return PassTime({1: 1e-3, 64: 1e-3})

    monkeypatch.setattr(PassTime, "measure", measure)
    llm = llm_for(pass_time=None, speculate="off")
    done: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: done.append(llm.generate(PROMPT, GREEDY, speculate="ngram").tokens))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [greedy(RULE, [BOS, *PROMPT.encode()], 24)] * 8
    assert measured == [llm.engine.target]


def test_unknown_options_of_llm_get_a_suggestion() -> None:
    with pytest.raises(UsageError, match="thread") as caught:
        LLM("nowhere.gguf", thread=3)
    assert "threads" in caught.value.hint


@pytest.mark.parametrize("value", [0, 1, 513, 2.5, "5", True])
def test_a_context_limit_the_model_does_not_have_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=f"max_model_len is {value!r}"):
        llm_for(max_model_len=value)


def test_a_context_limit_is_kept() -> None:
    llm = llm_for(max_model_len=20)
    assert llm.context_limit == 20
    done = llm.generate([1] * 15, SamplingParams(temperature=0))
    assert (len(done.tokens), done.finish_reason) == (5, "length")


def test_measuring_pass_times_late_leaves_cached_text_alone() -> None:
    llm = llm_for(speculate="off", pass_time=None)
    before = llm.generate(PROMPT, GREEDY)
    after = llm.generate(PROMPT, GREEDY, speculate="auto")
    assert after.tokens == before.tokens
    assert idle(llm)


def test_clear_forgets_prompts() -> None:
    llm = llm_for()
    llm.generate(PROMPT, GREEDY)
    assert llm.generate(PROMPT, GREEDY).cached_tokens > 0
    llm.clear()
    assert llm.generate(PROMPT, GREEDY).cached_tokens == 0


# --- breaking off ---------------------------------------------------------------------------------------


def abandon(llm: LLM, how: str, turn: int) -> None:
    prompt = f"{turn} {PROMPT}"
    stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=200))
    match how:
        case "never started":
            pass
        case "dropped":
            next(stream)
        case "closed":
            with closing(stream):
                next(stream)
                next(stream)
        case "raised":
            try:
                with stream:
                    for _ in stream:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass


@pytest.mark.parametrize("how", ["never started", "dropped", "closed", "raised"])
def test_x29_abandoned_streams_leave_nothing_behind(how: str) -> None:
    llm = llm_for(target={"pages": 40})
    expected = llm.generate(PROMPT, GREEDY)
    for turn in range(100):
        abandon(llm, how, turn)
        assert idle(llm)
    again = llm.generate(PROMPT, GREEDY)
    assert again.tokens == expected.tokens


def test_x29_memory_stays_flat() -> None:
    llm = llm_for(target={"pages": 24}, speculate="ngram")

    def turns(count: int) -> int:
        for turn in range(count):
            abandon(llm, "closed", turn % 7)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = turns(60)
        after = turns(200)
    finally:
        tracemalloc.stop()
    assert after - before < 40_000  # a request that stayed behind would cost several kB each turn


def test_two_streams_side_by_side_do_not_mix() -> None:
    llm = llm_for()
    params = SamplingParams(temperature=0, max_tokens=60)
    expected = [llm_for().generate(p, params).text for p in (PROMPT, "xyz")]
    streams = [llm.stream(p, params) for p in (PROMPT, "xyz")]
    texts = ["", ""]
    for first, second in zip(*streams, strict=False):
        texts[0] += first.text
        texts[1] += second.text
    for i, stream in enumerate(streams):
        texts[i] += "".join(chunk.text for chunk in stream)
    assert texts == expected


@pytest.mark.parametrize("when", [0, 1, 5])
def test_ctrl_c_in_a_pass_leaves_the_llm_usable_and_its_cache_warm(when: int) -> None:
    llm = llm_for(speculate="ngram:num_speculative_tokens=4")
    expected = llm.generate(PROMPT, GREEDY)
    target = llm.engine.target
    assert isinstance(target, StubTarget)
    paused = llm.stream("xyz", GREEDY)
    text = next(paused).text
    stream = llm.stream(PROMPT, GREEDY)
    for _ in range(when):
        next(stream)
    target.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    again = llm.generate(PROMPT, GREEDY)
    assert again.tokens == expected.tokens
    assert again.cached_tokens >= len(PROMPT)
    text += "".join(chunk.text for chunk in paused)
    assert text == llm_for().generate("xyz", GREEDY).text
    assert idle(llm)


def test_an_error_in_a_pass_reaches_the_caller_and_the_next_call_works() -> None:
    llm = llm_for()
    target = llm.engine.target
    assert isinstance(target, StubTarget)
    target.fail = MemoryError("on purpose")
    with pytest.raises(MemoryError):
        llm.generate([PROMPT, "xyz"], GREEDY)
    assert llm.generate(PROMPT, GREEDY).tokens == llm_for().generate(PROMPT, GREEDY).tokens
    assert idle(llm)


def test_threads_share_passes_and_get_their_own_texts() -> None:
    llm = llm_for(target={"pages": 30})
    prompts = [f"{i} {PROMPT}" for i in range(6)]
    expected = [llm_for().generate(p, GREEDY).tokens for p in prompts]
    done: dict[int, Completion] = {}

    def ask(i: int) -> None:
        for _ in range(3):
            done[i] = llm.generate(prompts[i], GREEDY)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done[i].tokens for i in range(len(prompts))] == expected
    assert idle(llm)


def test_the_package_offers_what_it_says() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        paceline.nothing  # noqa: B018
