"""Answers token ids with transformers; run by `harness.workers` with that engine's own Python."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens arrive; the first arrival is the prompt's own."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:  # noqa: ARG002 -- its interface
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def main(folder: str, threads: int, settings: dict[str, int]) -> None:
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    version = f"transformers {transformers.__version__}, torch {torch.__version__}, {model.dtype}"
    print(json.dumps({"version": version}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, settings, json.loads(line))), flush=True)


def answer(model: Any, settings: dict[str, int], asked: dict[str, Any]) -> dict[str, Any]:
    ids = torch.tensor([asked["ids"]])
    clock = Clock()
    with torch.inference_mode():
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=asked["max_tokens"],
            streamer=clock,
            **settings,
        )
    start, first, *_, last = [*clock.times, clock.times[-1]]
    return {
        "tokens": written[0, ids.shape[1] :].tolist(),
        "prefill_s": first - start,
        "decode_s": last - first,
        "passes": len(clock.times) - 2,
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
