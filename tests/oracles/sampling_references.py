"""transformers' logits processors in the order of `SamplingParams`, for what both define."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.4},
    "repetition rewarded": {"repetition_penalty": 0.8},
    "min_tokens": {"min_tokens": 20},
    "bias": {"logit_bias": {0: -100.0, 5: 3.0, 40: 1.5}},
    "top_k then top_p": {"top_k": 10, "top_p": 0.7},
    "all": {
        "repetition_penalty": 1.2,
        "logit_bias": {5: 3.0, 17: -2.0},
        "min_tokens": 20,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
    },
}
PROMPT = [2, 5, 9, 9, 31]
OUTPUT = [4, 4, 9, 60, 4, 12]
STOPS = [1, 3]


def logits() -> list[float]:
    """64 logits of both signs, all different, exact in float32."""
    return [((i * 37) % 64 - 40) / 8 for i in range(64)]


def probabilities(params: Mapping[str, Any]) -> list[float]:
    """What transformers would sample from after PROMPT and OUTPUT."""
    import torch
    from transformers import generation as hf

    ids = torch.tensor([PROMPT + OUTPUT])
    scores = torch.tensor([logits()])
    for processor in _processors(hf, params):
        scores = processor(ids, scores)
    result: Sequence[float] = torch.softmax(scores.double(), -1)[0].tolist()
    assert np.isfinite(result).all()
    return list(result)


def _processors(hf: Any, params: Mapping[str, Any]) -> list[Any]:
    chain: list[Any] = []
    if "repetition_penalty" in params:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    if "logit_bias" in params:
        bias = {(token,): value for token, value in params["logit_bias"].items()}
        chain.append(hf.SequenceBiasLogitsProcessor(bias))
    if "min_tokens" in params:
        chain.append(hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), params["min_tokens"], STOPS))
    if "temperature" in params:
        chain.append(hf.TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        chain.append(hf.TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        chain.append(hf.TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        chain.append(hf.MinPLogitsWarper(params["min_p"]))
    return chain
