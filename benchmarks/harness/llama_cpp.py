"""llama.cpp: its server as an arm, its bench tool as a stop-watch."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.arms import Answer
from harness.servers import ServerProcess
from paceline.core import SpeculationStats

SETTINGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "spec-default": ("--spec-default",),
    "simple-8-48": ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "8"),
    "simple-4-8": (
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4"),
        *("--spec-ngram-simple-size-m", "8"),
    ),
    "simple-3-16": (
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"),
        *("--spec-ngram-simple-size-m", "16"),
    ),
    "map-k-4-8": (
        *("--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "4"),
        *("--spec-ngram-map-k-size-m", "8"),
    ),
    "map-k4v-4-8": (
        *("--spec-type", "ngram-map-k4v", "--spec-ngram-map-k4v-size-n", "4"),
        *("--spec-ngram-map-k4v-size-m", "8"),
    ),
    "mod-8": (
        *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "8"),
        *("--spec-ngram-mod-n-min", "4", "--spec-ngram-mod-n-max", "16"),
    ),
    "cache": ("--spec-type", "ngram-cache"),
}
"""Every way to speculate without a second model: by its own defaults, and with shorter matches and drafts."""

MANY = 64
ANSWER_S = 600.0


def server(
    binary: Path,
    model: Path,
    setting: str,
    *,
    slots: int,
    threads: int,
    context: int,
    log: Path,
    flags: Sequence[str] = (),
) -> ServerProcess:
    """llama-server with so many slots of `context` tokens each; `flags` besides those of the setting."""
    command = [
        *(str(binary), "-m", str(model), "-t", str(threads), "-c", str(context * slots), "-np", str(slots)),
        *("--host", "127.0.0.1", "--port", "{port}", "--cache-ram", "0", "--no-webui"),
        *SETTINGS[setting],
        *flags,
    ]
    return ServerProcess(f"llama {setting}", command, log)


class LlamaServerArm:
    """A llama-server of one slot that reuses no prompt. Decode time is the server's own.

    Args:
        options: as of `server`.
    """

    def __init__(self, binary: Path, model: Path, setting: str, **options: Any) -> None:
        self.remembers = setting.startswith(("mod", "spec-default"))  # the pool of ngram-mod stays
        self._server = server(binary, model, setting, slots=1, **options)
        self.name = self._server.name

    def describe(self) -> dict[str, Any]:
        return {"engine": "llama.cpp", "command": self._server.shown}

    def answer(self, ids: Sequence[int], max_tokens: int) -> Answer:
        body = {
            "prompt": list(ids),
            "n_predict": max_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
        }
        reply = self._post("/completion", body)
        timings = reply["timings"]
        return Answer(
            [int(token) for token in reply["tokens"]],
            timings["prompt_ms"] / 1e3,
            timings["predicted_ms"] / 1e3,
            speculation(timings),
        )

    def close(self) -> None:
        self._server.close()

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=ANSWER_S)
        try:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{self.name}: {response.status} {text[:300]!r}")
        value: dict[str, Any] = json.loads(text)
        return value


def speculation(timings: dict[str, Any]) -> SpeculationStats:
    """A pass commits one token beside the accepted ones; the first token is prefill's."""
    accepted = int(timings.get("draft_n_accepted", 0))
    decoded = max(int(timings["predicted_n"]) - 1, 0)
    return SpeculationStats(
        passes=max(decoded - accepted, 0),
        drafted=int(timings.get("draft_n", 0)),
        accepted=accepted,
        committed=decoded,
    )


def version(binary: Path) -> str:
    done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=False)
    return next((line for line in (done.stderr + done.stdout).splitlines() if "version" in line), "unknown")


def bench(
    binary: Path, model: Path, *, rows: Sequence[int], repeats: int, threads: int, depth: int
) -> dict[int, list[float]]:
    """Seconds of passes by rows, from llama-bench; only the last row's logits are computed there."""
    found: dict[int, list[float]] = {}
    for some, times in ((False, repeats), (True, max(1, repeats // 4))):  # long passes need fewer
        asked = [n for n in rows if (n > MANY) == some]
        if asked:
            found |= _bench(binary, model, asked, times, threads, depth)
    return found


def _bench(
    binary: Path, model: Path, rows: Sequence[int], repeats: int, threads: int, depth: int
) -> dict[int, list[float]]:
    command = [
        *(str(binary), "-m", str(model), "-t", str(threads), "-n", "0", "-r", str(repeats)),
        *("-d", str(depth), "-o", "json", "-p", ",".join(map(str, rows))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"llama-bench failed: {done.stderr[-1500:]}")
    return {
        int(test["n_prompt"]): [ns / 1e9 for ns in test["samples_ns"]] for test in json.loads(done.stdout)
    }
