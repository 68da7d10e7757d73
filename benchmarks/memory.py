"""Memory that a loaded model takes, against its file (at most file + KV cache + 15 % of the file) and against
what `paceline plan` foretells for the same number of tokens; with --drafter, that of drafters beside it.

Each model is loaded in a process of its own, which answers one prompt before it is looked at. Heads guess
seven of ten tokens right meanwhile. Pages of mapped files that tables are looked up in are the system's to
drop: they are shown, and count neither as planned nor as held. See README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness import results

from paceline import LLM, SamplingParams
from paceline.core import HearingDrafter
from paceline.tools.provenance import describe_file

HEADROOM = 0.15
FIELDS = ("VmRSS", "RssAnon", "RssFile", "VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument(
        "--drafter",
        nargs="+",
        metavar="SPEC",
        help="as the verbs take it; the kind of a head without a path means a random one of the usual shape",
    )
    parser.add_argument("--inside", help="measure this process with such drafters; used by the script itself")
    parser.add_argument("--answer", type=json.loads, default=[], help="what the model will write; so is this")
    parser.add_argument("--name", default="memory", help="of the result files")
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(inside(asked.models[0], asked.prompt_tokens, asked.inside, asked.answer)))
    elif asked.drafter:
        report_drafters(asked.models[0], asked.prompt_tokens, asked.drafter, asked.name)
    else:
        report_models([outside(path, asked.prompt_tokens, "auto") for path in asked.models], asked.name)


def report_models(found: Sequence[dict[str, Any]], name: str) -> None:
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
    results.write(name, {"models": found}, "# Memory\n\n" + results.table(head, rows))


def report_drafters(model: Path, prompt_tokens: int, specs: Sequence[str], name: str) -> None:
    plain = outside(model, prompt_tokens, "off")
    found = {"none": plain}
    for spec in specs:
        with tempfile.TemporaryDirectory() as folder:
            meant = with_head(model, spec, Path(folder))
            found[spec] = outside(model, prompt_tokens, meant, plain["answer"])
    head = [
        *("drafter", "drafted", "accepted", "resident MB", "of it tables", "of it rehearsal", "peak MB"),
        *("held MB", "without it", "more", "planned more", "planned MB", "off by"),
    ]
    rows = [
        [
            *(spec, f["drafted"], f["accepted"], _mb(f["VmRSS"]), _mb(f["tables"]), _mb(f["rehearsal"])),
            *(_mb(f["VmHWM"]), _mb(_held(f)), _mb(_held(plain)), _mb(_held(f) - _held(plain))),
            *(_mb(f["planned"] - plain["planned"]), _mb(f["planned"])),
            f"{f['planned'] / _held(f) - 1:+.1%}",
        ]
        for spec, f in found.items()
    ]
    told = f"{model.name}, a prompt of {prompt_tokens} tokens, {plain['tokens']} in all.\n\n"
    results.write(name, {"drafters": found}, "# Memory with drafters\n\n" + told + results.table(head, rows))


def with_head(model: Path, spec: str, folder: Path) -> str:
    """The drafter that is meant: with the path of a random head where only its kind is given."""
    from harness.rehearsal import KINDS, write_head

    from paceline.models.config import DecoderConfig
    from paceline.weights.gguf import GGUFFile

    kind, _, options = spec.partition(":")
    if kind not in KINDS or (options and "=" not in options.split(",")[0]):
        return spec
    with GGUFFile.open(model) as file:
        config, vocab = DecoderConfig.from_metadata(file.metadata), file.tensors["token_embd.weight"].shape[0]
    path = write_head(kind, config, vocab, folder / kind, ())
    return f"{kind}:{path}" + (f",{options}" if options else "")


def inside(path: Path, prompt_tokens: int, spec: str, expected: list[int]) -> dict[str, Any]:
    """Bytes that this process holds after loading a model and answering one prompt.

    Args:
        expected: what it will write, if heads are to guess that.
    """
    base = status()["VmRSS"]
    with LLM(path, max_model_len=4096, speculate=spec) as llm:
        tokens = [5 + i % 1000 for i in range(prompt_tokens)]
        heads: list[Any] = [drafter for drafter in llm.draft_models if isinstance(drafter, HearingDrafter)]
        loaded = status()["VmRSS"]
        if heads and expected:
            rehearse(heads, tokens, expected)
        rehearsal = status()["VmRSS"] - loaded  # no part of what is measured
        answer = llm.generate(tokens, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
        tokens_held = prompt_tokens + len(answer.tokens)
        kv_bytes: int = llm.engine.target.cache.held(tokens_held)  # type: ignore[attr-defined]
        files = [str(path), *(str(head.network.checkpoint.path) for head in heads)]
        told = {"before": base, "kv_bytes": kv_bytes, "tokens": tokens_held, "tables": mapped(files)}
        its = answer.speculation
        told |= {"rehearsal": rehearsal, "drafted": its.drafted, "accepted": its.accepted}
        return {"answer": answer.tokens, **told, **status()}


def rehearse(heads: Sequence[Any], prompt: list[int], answer: list[int]) -> None:
    """Have heads guess as trained ones would."""
    from harness.rehearsal import Rehearsed, Script

    for head in heads:
        Rehearsed(head).script = Script(prompt + answer, len(prompt), [0.7], 1)


def planned(path: Path, tokens: int, spec: str) -> dict[str, Any]:
    """What `paceline plan` foretells, in bytes."""
    command = [sys.executable, "-m", "paceline", "plan", str(path), "-c", str(tokens), "--json"]
    done = subprocess.run([*command, "--drafter", spec], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    return {"planned": told["total"], "parts": {part["name"]: part["bytes"] for part in told["parts"]}}


def outside(path: Path, prompt_tokens: int, spec: str, expected: Sequence[int] = ()) -> dict[str, Any]:
    command = [sys.executable, __file__, str(path), "--inside", spec, "--prompt-tokens", str(prompt_tokens)]
    command += ["--answer", json.dumps(list(expected))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{path}: {done.stderr[-1500:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    measured |= planned(path, measured["tokens"], spec)
    return against_file(describe_file(path), measured)


def against_file(model: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Add the limit, and by what share of the file the memory goes beyond file and cache."""
    size, kv = model["bytes"], measured["kv_bytes"]
    over = (measured["VmRSS"] - size - kv) / size
    return {"model": model, **measured, "limit": round(size * (1 + HEADROOM)) + kv, "over": over}


def mapped(files: Sequence[str]) -> int:
    """Bytes of files, or of those in folders, that are mapped and resident here."""
    size, counts = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if "-" in words[0]:
            counts = len(words) > 5 and words[5].startswith(tuple(files))
        elif words[0] == "Rss:" and counts:
            size += int(words[1]) * 1024
    return size


def _held(measured: dict[str, Any]) -> int:
    """Bytes resident, without pages that the system may drop and what makes heads guess well."""
    return int(measured["VmRSS"] - measured["tables"] - measured["rehearsal"])


def status() -> dict[str, int]:
    """Bytes by field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    values = {line.split(":")[0]: line.split() for line in lines}
    return {name: int(values[name][1]) * 1024 for name in FIELDS}


def _mb(size: float) -> float:
    return size / 1e6


if __name__ == "__main__":
    main()
