"""P-EAGLE: several tokens of one pass are those of the formula, and change no byte of any text."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core import ROOT, Context, Prices, SamplingParams
from paceline.drafters.checkpoint import open_checkpoint
from paceline.drafters.outlook import Hope
from paceline.drafters.parallel import ParallelOutlook
from paceline.drafters.registry import create
from paceline.engine.engine import Engine
from paceline.errors import PacelineError, UsageError
from support.engines import TOKENIZER, finish, run, same, submit
from support.head_targets import (
    ON,
    TEXTS,
    compare,
    drafter_for,
    heard,
    host_for,
    reference_for,
    states_of,
    target_for,
    tokens_of,
)
from support.planners import FixedPlanner
from support.tiny_peagle import ReferencePeagle, TinyPeagle
from support.tiny_tokenizer import VOCAB_SIZE

HEAD = TinyPeagle(vocab=VOCAB_SIZE, draft_vocab=200)
HEADS = {
    "speculators": HEAD,
    "SpecForge": replace(HEAD, layout="SpecForge"),
    "all ids, normed queries, one layer": replace(HEAD, draft_vocab=0, qk_norm=True, head_dim=32, layers=1),
    "a norm before everything": replace(HEAD, norm_before_fc=True),
    "norms of each state": replace(HEAD, fc_norm=True),
    "normed residual": replace(HEAD, norm_before_residual=True, taps=(1, 4, 8)),
}
CHEAP = Prices(plain=1.0, tokens=1.0, extra=[1e-6 * n for n in range(65)])


def loaded(tmp_path: Path, tiny: TinyPeagle = HEAD, **options: Any) -> tuple[Any, Any, Any]:
    target = target_for(tmp_path)
    drafter = drafter_for(target, tiny.write(tmp_path / "head"), **options)
    return target, drafter, reference_for(target, tiny, ReferencePeagle)


@pytest.mark.parametrize("name", HEADS)
def test_logits_and_guesses_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    target, drafter, reference = loaded(tmp_path, HEADS[name])
    assert drafter.name == "peagle"
    for length in (1, 3, 5):
        drafter.reset()
        compare(drafter, target, reference, length)


def test_it_guesses_no_further_than_it_was_trained(tmp_path: Path) -> None:
    target, drafter, _ = loaded(tmp_path)
    context = heard(drafter, target, tokens_of(1, 9), params=ON)
    assert len(drafter.propose(context, 30)) == 5
    silent: Any = drafter_for(target, replace(HEAD, depths=None).write(tmp_path / "o"))
    assert silent.longest == 8


@pytest.mark.parametrize("slip", ["mask", "state", "position", "layer"])
def test_an_error_of_one_shows(slip: str, tmp_path: Path) -> None:
    target, drafter, reference = loaded(tmp_path)
    if slip == "mask":
        drafter._mask += 1
    elif slip == "state":
        drafter._state = np.roll(drafter._state, 1)
    elif slip == "position":
        reference.slip = 1
    else:
        drafter = drafter_for(target, tmp_path / "head", layers=(1, 4, 5))
    with pytest.raises(AssertionError):
        compare(drafter, target, reference, texts=TEXTS[2:])


def test_what_is_drafted_follows_from_the_text_alone(tmp_path: Path) -> None:
    target, drafter, reference = loaded(tmp_path)
    rng = random.Random(3)
    contexts = [heard(drafter, target, tokens_of(i % 2, 30 + i), request=i, params=ON) for i in range(3)]
    for _ in range(20):
        context, length = rng.choice(contexts), rng.randint(1, 5)
        draft = drafter.propose(context, length)
        states = states_of(target, context.tokens, HEAD.taps)
        wanted, _ = reference.chain(context.tokens, [states[tap][:-1] for tap in HEAD.taps], length)
        assert draft.tokens == wanted
        start = len(context.tokens) - 1
        context.tokens += [*draft.tokens[: rng.randint(0, length)], rng.randrange(VOCAB_SIZE)]
        more = states_of(target, context.tokens, drafter.layers)
        drafter.hear(context, start, {layer: found[start:-1] for layer, found in more.items()})
        drafter.commit(context, None)
        drafter.cache.kv.check_integrity()


def test_requests_share_a_pass_and_long_texts_are_read_in_parts(tmp_path: Path) -> None:
    target, drafter, _ = loaded(tmp_path)
    contexts = [heard(drafter, target, tokens_of(i, 20 + 30 * i), request=i, params=ON) for i in range(3)]
    passes: list[int] = []
    run_head = drafter.head.run

    def counted(feeds: Any, part: int) -> Any:
        passes.append(sum(len(feed.tokens) for feed in feeds))
        return run_head(feeds, part)

    drafter.head.run = counted
    together = drafter.propose_many(contexts, [5, 1, 3], None)
    assert passes == [19 + 4 + 49 + 79 + 2]
    assert [len(draft) for draft in together] == [5, 1, 3]
    drafter.reset()
    drafter.head.max_rows = 32
    again = [heard(drafter, target, tokens_of(i, 20 + 30 * i), request=i, params=ON) for i in range(3)]
    parts = drafter.propose_many(again, [5, 1, 3], None)
    assert max(passes[1:]) <= 32
    for one, other in zip(together, parts, strict=True):
        assert one.tokens == other.tokens


def test_second_choices_stand_beside_the_first(tmp_path: Path) -> None:
    target, drafter, reference = loaded(tmp_path)
    context = heard(drafter, target, tokens_of(2, 20), params=ON)
    (draft,) = drafter.propose_many([context], [16], CHEAP)
    parents = draft.parents
    states = states_of(target, context.tokens, HEAD.taps)
    _, logits = reference.chain(context.tokens, [states[tap][:-1] for tap in HEAD.taps], 5)
    node = ROOT
    for row in logits:
        children = [i for i, parent in enumerate(parents) if parent == node]
        ranked = [int(HEAD.kept[i]) for i in np.argsort(-row, kind="stable")]
        assert [draft.tokens[i] for i in children] == ranked[: len(children)]
        if not children:
            break
        node = children[0]
    assert parents.count(ROOT) > 1
    assert len(draft) > 5


def test_random_batches_equal_plain_decoding(tmp_path: Path) -> None:
    rng = random.Random(5)
    target, _, _ = loaded(tmp_path)
    small = target_for(tmp_path, pages=6)
    drafted = 0
    for _ in range(6):
        drafter: Any = drafter_for(target, tmp_path / "head", dtype=rng.choice(["q8", "q4", "bf16"]))
        engine = Engine(small, TOKENIZER, context_limit=128)
        prompts = [[7, *tokens_of(rng.randrange(3), rng.randint(1, 50))] for _ in range(4)]
        params = [
            SamplingParams(
                temperature=rng.choice([0.0, 0.8]),
                top_k=rng.choice([0, 20]),
                repetition_penalty=rng.choice([1.0, 1.2]),
                seed=rng.getrandbits(40),
                max_tokens=rng.choice([2, 12, 24]),
            )
            for _ in range(4)
        ]
        requests = [
            submit(engine, prompt, its, FixedPlanner(drafter, rng.choice([1, 3, 9])))
            for prompt, its in zip(prompts, params, strict=True)
        ]
        for prompt, its, done in zip(prompts, params, finish(engine, *requests), strict=True):
            same(run(Engine(target, TOKENIZER), prompt, its), done)
            drafted += done.speculation.drafted
        assert drafter.cache.kv.available == drafter.cache.kv.pages
    assert drafted > 100


def test_the_length_is_what_pays() -> None:
    """Free rows: as far as chances go; dear ones: not at all."""

    def outlook(row: float, extra: float) -> ParallelOutlook:
        prices = Prices(plain=1.0, tokens=1.0, extra=[extra * n for n in range(33)])
        return ParallelOutlook(prices, lambda rows: 0.1 + row * rows, 8)

    sure, doubtful = Hope(0.9, 32, 2, 20.0), Hope(0.3, 32, 2, 20.0)
    assert outlook(0.0, 0.0).length([sure]) == 8
    assert outlook(0.0, 0.03).length([doubtful]) == 2
    assert outlook(0.2, 0.0).length([doubtful]) == 1
    assert outlook(0.01, 0.01).length([Hope(0.9, 3, 2, 20.0)]) == 3
    assert outlook(0.0, 0.01).open([sure]) == [0]
    assert outlook(0.0, 1.0).open([doubtful]) == []
    # 1 + 0.9 tokens in 1 + 0.1 + 2 * 0.01 + 0.05 seconds
    assert outlook(0.01, 0.05)._rates([sure])[0] == pytest.approx(1.9 / 1.17)


def test_a_draft_that_cannot_pay_is_not_begun(tmp_path: Path) -> None:
    target, drafter, _ = loaded(tmp_path)
    context = heard(drafter, target, tokens_of(1, 9), params=ON)
    drafter.head.run = None  # would fail
    dear = Prices(plain=1e-6, tokens=1.0, extra=[1e-6 * n for n in range(9)])
    assert len(drafter.propose_many([context], [8], dear)[0]) == 0
    assert len(drafter.propose(Context(9, [1, 2], 2), 4)) == 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"settings": {"mask_token_id": None}}, "does not say which token masks"),
    "a mask outside": ({"mask": VOCAB_SIZE}, f"mask_token_id is {VOCAB_SIZE}, of {VOCAB_SIZE} tokens"),
    "a mask that is none": ({"settings": {"mask_token_id": "x"}}, "mask_token_id is x"),
    "no depth": ({"depths": 0}, "guesses 0 tokens"),
    "too deep": ({"depths": 99}, "guesses 99 tokens in parallel"),
    "no layers": (
        {"settings": {"eagle_aux_hidden_state_layer_ids": None}},
        "does not say which layers of the target it reads",
    ),
    "another width": ({"width": 96}, "for 3 layers of a target 64 wide"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_draft_wrongly_is_refused(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    path = replace(HEAD, **change).write(tmp_path / "head")
    with pytest.raises(PacelineError, match=message) as raised:
        drafter_for(target_for(tmp_path), path)
    assert raised.value.hint


def test_the_states_of_masks_decide(tmp_path: Path) -> None:
    target = target_for(tmp_path)
    path = HEAD.write(tmp_path / "none", without=["mask_hidden"])
    with pytest.raises(PacelineError, match="no tensor mask_hidden"):
        drafter_for(target, path)
    for name, state, message in (
        ("short", np.ones((1, 1, 64), np.float32), r"mask_hidden is \(1, 1, 64\), fc reads 192"),
        ("nan", np.full((1, 1, 192), np.nan, np.float32), "mask_hidden: infinite or not a number"),
    ):
        path = HEAD.write(tmp_path / name, change={"mask_hidden": state})
        with pytest.raises(PacelineError, match=message):
            drafter_for(target, path)
    eagle3 = replace(HEAD, settings={"speculators_model_type": "eagle3"}).write(tmp_path / "named")
    assert open_checkpoint(eagle3).kind == "peagle"


def test_by_its_names(tmp_path: Path) -> None:
    host = host_for(target_for(tmp_path))
    path = HEAD.write(tmp_path / "head")
    for spec in (f"peagle:{path}", f"p-eagle:model={path}", {"method": "peagle", "model": str(path)}):
        assert create(spec, vocab_size=VOCAB_SIZE, host=host).name == "peagle"
    with pytest.raises(UsageError, match="holds a drafter of kind peagle, not eagle3"):
        create(f"eagle3:{path}", vocab_size=VOCAB_SIZE, host=host)
