"""A draft model: right where it agrees, harmless where not, and its cache always what it says."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.core import SamplingParams
from paceline.drafters.model import ModelDrafter
from support.draft_models import FixedCosts, Padded, Reordered, draft_model, shuffled
from support.engines import engine_for, finish, run, same, submit
from support.planners import FixedPlanner
from support.stub_target import RandomRule, RepetitiveRule, greedy
from support.tiny_tokenizer import VOCAB_SIZE

RULE = RepetitiveRule(VOCAB_SIZE, seed=1, peak=6.0)
PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_always_right(temperature: float) -> None:
    drafter = draft_model(RULE)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=200, ignore_eos=True)
    planner = FixedPlanner(drafter, 4)
    done = run(engine_for(RULE), PROMPT, params, planner)
    same(run(engine_for(RULE), PROMPT, params), done)
    assert done.speculation.acceptance_rate == 1.0
    assert done.speculation.passes == 40  # 199 tokens, 5 at a time
