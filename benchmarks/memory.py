"""Memory that a loaded model takes, against its file (at most file + KV cache + 15 % of the file) and against
what `paceline plan` foretells for the same number of tokens.

Each model is loaded in a process of its own, which answers one prompt before it is looked at. See README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import results

from paceline import LLM, SamplingParams
from paceline.tools.provenance import describe_file

HEADROOM = 0.15
FIELDS = ("VmRSS", "RssAnon", "RssFile", "VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument(
        "--inside", action="store_true", help="measure this process; used by the script itself"
    )
    parser.add_argument("--name", default="memory", help="of the result files")
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(inside(asked.models[0], asked.prompt_tokens)))
        return
    found = [outside(path, asked.prompt_tokens) for path in asked.models]
    head = [
        "model",
        "file MB",
        "KV MB",
        "limit MB",
        "resident MB",
        "over file + KV",
        "of it mapped file",
        "peak MB",
        "planned MB",
        "off by",
    ]
    rows = [
        [
            *(f["model"]["name"], _mb(f["model"]["bytes"]), _mb(f["kv_bytes"]), _mb(f["limit"])),
            *(_mb(f["VmRSS"]), f"{f['over']:+.1%}", _mb(f["RssFile"]), _mb(f["VmHWM"])),
            *(_mb(f["planned"]), f"{f['planned'] / f['VmRSS'] - 1:+.1%}"),
        ]
        for f in found
    ]
    results.write(asked.name, {"models": found}, "# Memory\n\n" + results.table(head, rows))


def inside(path: Path, prompt_tokens: int) -> dict[str, int]:
    """Bytes that this process holds after loading a model and answering one prompt."""
    base = status()["VmRSS"]
    with LLM(path, max_model_len=4096) as llm:
        tokens = [5 + i % 1000 for i in range(prompt_tokens)]
        answer = llm.generate(tokens, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
        tokens_held = prompt_tokens + len(answer.tokens)
        kv_bytes: int = llm.engine.target.cache.held(tokens_held)  # type: ignore[attr-defined]
        return {"before": base, "kv_bytes": kv_bytes, "tokens": tokens_held} | status()


def planned(path: Path, tokens: int) -> int:
    """Bytes that `paceline plan` foretells."""
    command = [sys.executable, "-m", "paceline", "plan", str(path), "-c", str(tokens), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)["total"])


def outside(path: Path, prompt_tokens: int) -> dict[str, Any]:
    command = [sys.executable, __file__, str(path), "--inside", "--prompt-tokens", str(prompt_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{path}: {done.stderr[-1500:]}")
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    measured["planned"] = planned(path, measured["tokens"])
    return against_file(describe_file(path), measured)


def against_file(model: dict[str, Any], measured: dict[str, int]) -> dict[str, Any]:
    """Add the limit, and by what share of the file the memory goes beyond file and cache."""
    size, kv = model["bytes"], measured["kv_bytes"]
    over = (measured["VmRSS"] - size - kv) / size
    return {"model": model, **measured, "limit": round(size * (1 + HEADROOM)) + kv, "over": over}


def status() -> dict[str, int]:
    """Bytes by field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    values = {line.split(":")[0]: line.split() for line in lines}
    return {name: int(values[name][1]) * 1024 for name in FIELDS}


def _mb(size: float) -> float:
    return size / 1e6


if __name__ == "__main__":
    main()
