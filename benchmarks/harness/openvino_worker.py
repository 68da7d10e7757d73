"""Answers token ids with OpenVINO GenAI; run by `harness.workers` with that engine's own Python."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import openvino
import openvino_genai


def main(model: str, threads: int, settings: dict[str, int]) -> None:
    lookup = {"prompt_lookup": True} if settings else {}
    pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads, **lookup)
    print(json.dumps({"version": f"openvino-genai {openvino_genai.__version__}"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(pipeline, settings, json.loads(line))), flush=True)


def answer(pipeline: Any, settings: dict[str, int], asked: dict[str, Any]) -> dict[str, Any]:
    config = pipeline.get_generation_config()
    config.do_sample = False
    config.repetition_penalty = 1.0
    config.max_new_tokens = asked["max_tokens"]
    for name, value in settings.items():
        setattr(config, name, value)
    ids = np.asarray([asked["ids"]], np.int64)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    result = pipeline.generate(inputs, config)
    metrics = result.perf_metrics
    first = metrics.get_ttft().mean / 1e3
    return {
        "tokens": [int(token) for token in result.tokens[0]],
        "prefill_s": first,
        "decode_s": metrics.get_generate_duration().mean / 1e3 - first,
        "passes": max(len(metrics.raw_metrics.m_batch_sizes) - 1, 0),
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
