"""Engines in environments of their own as arms: a process each, asked line by line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.arms import Answer
from paceline.core import SpeculationStats

SETTINGS: dict[str, dict[str, dict[str, int]]] = {
    "openvino": {
        "plain": {},
        "lookup-5": {"num_assistant_tokens": 5, "max_ngram_size": 3},
        "lookup-8": {"num_assistant_tokens": 8, "max_ngram_size": 3},
    },
    "transformers": {
        "plain": {},
        "lookup-5": {"prompt_lookup_num_tokens": 5},
        "lookup-10": {"prompt_lookup_num_tokens": 10},
    },
    "vllm": {
        "plain": {},
        "ngram-5": {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    },
}
"""Ways to run each engine; `ENGINE_worker.py` knows what they mean."""


class WorkerArm:
    """OpenVINO GenAI over a converted model's folder or a GGUF of Q4_0, Q4_1 or Q8_0; or transformers or
    vLLM over a folder of safetensors, in the type of its weights.
    """

    remembers = False

    def __init__(
        self, engine: str, python: Path, model: Path, setting: str, *, threads: int, log: Path
    ) -> None:
        self.name = f"{engine} {setting}"
        self._settings = SETTINGS[engine][setting]
        self._model = model.name
        self._threads = threads
        worker = Path(__file__).with_name(f"{engine}_worker.py")
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [str(python), "-P", str(worker), str(model), str(threads), json.dumps(self._settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )
        self.version = str(self._read(log).get("version"))

    def describe(self) -> dict[str, Any]:
        engine = {"engine": self.version, "model": self._model}
        return engine | {"threads": self._threads} | self._settings

    def answer(self, ids: Sequence[int], max_tokens: int) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": list(ids), "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        reply = self._read(None)
        tokens: list[int] = reply["tokens"]
        decoded = max(len(tokens) - 1, 0)
        stats = SpeculationStats(
            passes=reply["passes"], committed=decoded, accepted=max(decoded - reply["passes"], 0)
        )
        return Answer(tokens, reply["prefill_s"], reply["decode_s"], stats)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _read(self, log: Path | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                value: dict[str, Any] = json.loads(line)
                return value
        tail = "" if log is None else log.read_text(encoding="utf-8", errors="replace")[-1500:]
        raise RuntimeError(f"{self.name} ended:\n{tail}")
