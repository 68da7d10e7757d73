"""Runs in an environment with vLLM: writes a text, and all that was drafted on the way, as JSON to a file.

python vllm_worker.py TARGET HEAD METHOD COUNT PROMPT OUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
WORDS = 10


def main(target: str, head: str, method: str, count: str, prompt: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=256,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        speculative_config={"method": method, "model": head, "num_speculative_tokens": int(count)},
    )
    worker = llm.llm_engine.model_executor.driver_worker
    while hasattr(worker, "worker"):
        worker = worker.worker
    drafted = _watch(worker.model_runner.drafter)
    params = SamplingParams(temperature=0, max_tokens=WORDS, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": json.loads(prompt)}], params)
    Path(out).write_text(json.dumps({"tokens": list(answer.outputs[0].token_ids), "drafted": drafted}))


def _watch(drafter: Any) -> list[Any]:
    """[(tokens, logits that each was chosen by)] of every draft from now on."""
    drafted: list[Any] = []
    rows: list[Any] = []
    propose, compute = drafter.propose, drafter.model.compute_logits

    def proposed(*given: Any, **named: Any) -> Any:
        rows.clear()
        tokens = propose(*given, **named)
        drafted.append((tokens.reshape(-1).tolist(), rows[-tokens.numel() :]))
        return tokens

    def computed(*given: Any, **named: Any) -> Any:
        logits = compute(*given, **named)
        rows.extend(logits.float().tolist())
        return logits

    drafter.propose, drafter.model.compute_logits = proposed, computed
    return drafted


if __name__ == "__main__":
    main(*sys.argv[1:])
