"""Answers token ids with vLLM on the CPU; run by `harness.workers` with that engine's own Python."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

# Before vLLM is imported: its engine in this process, on exactly the cores that the other engines have.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{int(sys.argv[2]) - 1}"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import vllm

CONTEXT = 4096


def main(folder: str, settings: dict[str, int]) -> None:
    told = os.dup(1)  # vLLM and what it compiles write to the standard output
    os.dup2(2, 1)
    speculative = {"method": "ngram", **settings} if settings else None
    llm = vllm.LLM(
        folder, max_model_len=CONTEXT, enable_prefix_caching=False, speculative_config=speculative, seed=0
    )
    with os.fdopen(told, "w") as out:
        print(
            json.dumps({"version": f"vllm {vllm.__version__}, {settings or 'plain'}"}), file=out, flush=True
        )
        for number, line in enumerate(sys.stdin):
            print(json.dumps(answer(llm.llm_engine, str(number), json.loads(line))), file=out, flush=True)


def answer(engine: Any, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    params = vllm.SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"])
    start = time.perf_counter()
    engine.add_request(name, {"prompt_token_ids": asked["ids"]}, params)
    tokens: list[int] = []
    times: list[float] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if len(output.outputs[0].token_ids) > len(tokens):
                tokens = list(output.outputs[0].token_ids)
                times.append(time.perf_counter())
    return {
        "tokens": tokens,
        "prefill_s": times[0] - start,
        "decode_s": times[-1] - times[0],
        "passes": len(times) - 1,
    }


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[3]))
