"""`paceline serve` against llama-server: throughput under busy clients, and what one client feels.

Three parts, all by default. *load*: output tokens/s at several numbers of clients, by turns, every engine
started anew for each; our answers must be equal at every load, with and without speculation. *first-token*: a
short prompt's first token while a long prompt is read, against an idle server. *overhead*: a server's answers
against the same engine in this process. See README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from harness import llama_cpp, results, servers, tasks
from harness.latency import FirstToken, Overhead, first_token, overhead
from harness.load_rounds import Equality, LevelResult, Run, Start, equality, judge, measure
from harness.tasks import Task

from paceline import LLM, SamplingParams
from paceline.tools.load import Clients
from paceline.tools.load_figures import written
from paceline.tools.provenance import describe_file

PARTS = ("load", "first-token", "overhead")
OFF, AUTO = "paceline off", "paceline auto"
TIMEOUT_S = 600.0


def main() -> None:
    asked = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left running
    with LLM(asked.model, threads=asked.threads, max_model_len=asked.context) as llm:
        longest = asked.context - asked.max_tokens
        todo = tasks.collect(
            llm,
            spec_bench=asked.spec_bench,
            human_eval=asked.humaneval,
            per_category=asked.per_category,
            longest=min(longest, asked.longest),
        )
    result: dict[str, Any] = {
        "model": describe_file(asked.model),
        "settings": {"max_tokens": asked.max_tokens, "context": asked.context, "threads": asked.threads},
    }
    sections = [f"# Serving {asked.model.name}: at most {asked.max_tokens} tokens per answer\n"]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for part in asked.parts.split(","):
            step = {"load": load_part, "first-token": first_token_part, "overhead": overhead_part}[part]
            result[part.replace("-", "_")], section, good = step(asked, todo, Path(folder))
            sections.append(section)
            failed = failed or not good
    results.write(asked.name or f"serve-{asked.model.stem}", result, "\n".join(sections))
    sys.exit(1 if failed else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="GGUF file that every engine reads")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: all")
    parser.add_argument("--spec-bench", type=Path, help="Spec-Bench questions (JSON lines)")
    parser.add_argument("--humaneval", type=Path, help="HumanEval problems (JSON lines)")
    parser.add_argument("--per-category", type=int, help="most prompts of a category; default all")
    parser.add_argument("--longest", type=int, default=1024, help="leave out prompts of more tokens")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=4096, help="tokens per client")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16, help="fewest requests at a level")
    parser.add_argument("--per-client", type=int, default=4, help="fewest requests of a client")
    parser.add_argument("--llama-server", type=Path, help="binary of llama.cpp's server")
    parser.add_argument("--llama-settings", default=",".join(llama_cpp.SETTINGS), help="default: all known")
    parser.add_argument("--long", type=int, default=3000, help="tokens of the long prompt")
    parser.add_argument("--short", type=int, default=20, help="tokens of the short prompt")
    parser.add_argument("--times", type=int, default=10, help="short prompts beside a long one")
    parser.add_argument("--answers", type=int, default=20, help="answers to measure the overhead with")
    parser.add_argument("--name", help="of the result files; default: from the model's")
    asked = parser.parse_args()
    for flag, given, known in (
        ("--parts", asked.parts, PARTS),
        ("--llama-settings", asked.llama_settings, llama_cpp.SETTINGS),
    ):
        if odd := [name for name in given.split(",") if name not in known]:
            parser.error(f"{flag} names {odd[0]!r}; known are {', '.join(known)}")
    return asked


def engines(asked: argparse.Namespace, logs: Path) -> Iterator[tuple[str, Start]]:
    """Name and start of every engine; llama-server gets as many slots as there are clients."""

    def ours(speculate: str) -> Start:
        return lambda _: servers.paceline(
            asked.model, speculate, threads=asked.threads, context=asked.context, log=logs / speculate
        )

    def llama(setting: str) -> Start:
        return lambda clients: llama_cpp.server(
            asked.llama_server,
            asked.model,
            setting,
            slots=clients,
            threads=asked.threads,
            context=asked.context,
            log=logs / setting,
        )

    for name in (OFF, AUTO):
        yield name, ours(name.split()[1])
    for setting in asked.llama_settings.split(",") if asked.llama_server else ():
        yield f"llama {setting}", llama(setting)


def load_part(asked: argparse.Namespace, todo: Sequence[Task], logs: Path) -> tuple[Any, str, bool]:
    levels = [int(word) for word in asked.clients.split(",")]
    prompts = [task.prompt for task in todo]
    short_of = max(max(asked.requests, asked.per_client * clients) for clients in levels)
    if len(prompts) < short_of:
        print(f"only {len(prompts)} prompts; {short_of} would give every client enough to do")
    runs = measure(
        dict(engines(asked, logs)),
        levels,
        lambda clients: prompts[: max(asked.requests, asked.per_client * clients)],
        SamplingParams(temperature=0.0, max_tokens=asked.max_tokens),
        rounds=asked.rounds,
        timeout=TIMEOUT_S,
        note=note,
    )
    found, same = judge(runs, ours=AUTO, off=OFF, peer="llama"), equality(runs, (OFF, AUTO))
    result = {"levels": [asdict(level) for level in found], "equality": asdict(same)}
    result["runs"] = [asdict(run) for run in runs]
    failed = [run for run in runs if run.figures.errors]
    return result, load_table(found, same, runs), not same.differences and not failed


def note(run: Run) -> None:
    f = run.figures
    where = f"round {run.round}, {Clients(run.clients).label}, {run.engine}"
    first = written(f.first_token_s, 1e3, 0)
    failed = f", failed: {f.errors}" if f.errors else ""
    print(
        f"{where}: {f.output_tokens_per_s:.1f} tokens/s, {f.completion_tokens} tokens, "
        f"first token {first} ms{failed}",
        flush=True,
    )


def load_table(found: Sequence[LevelResult], same: Equality, runs: Sequence[Run]) -> str:
    rows = [
        [
            *(level.clients, level.requests, level.speeds.get(OFF), level.speeds.get(AUTO)),
            *(level.best or None, level.speeds.get(level.best), level.over_best, level.over_off),
        ]
        for level in found
    ]
    head = ["clients", "requests", "off", "auto", "best of llama", "its speed", "auto / it", "auto / off"]
    names = sorted({run.engine for run in runs})
    by_engine = [[name, *(level.speeds.get(name) for level in found)] for name in names]
    clients = [Clients(level.clients).label for level in found]
    tails = [[run.engine, run.clients, *latencies(run)] for run in runs if run.round == 0]
    verdict = (
        f"{len(same.differences)} of our answers DIFFER: {'; '.join(same.differences[:5])}"
        if same.differences
        else f"Our {same.texts} answers to {same.prompts} prompts are equal, off and auto, at every load."
    )
    failed = sum(sum(run.figures.errors.values()) for run in runs)
    return (
        f"Output tokens/s, median of {max(run.round for run in runs) + 1} rounds; ratios round by round, "
        f"median (lowest to highest). {verdict} {failed} requests failed.\n\n"
        + results.table(head, rows)
        + "\n"
        + results.table(["tokens/s", *clients], by_engine)
        + "\n"
        + results.table(
            ["first round", "clients", "first token ms", "inter-token ms", "latency s", "resident MB"], tails
        )
    )


def latencies(run: Run) -> list[Any]:
    f = run.figures
    return [
        written(f.first_token_s, 1e3, 0),
        written(f.inter_token_s, 1e3, 1),
        written(f.latency_s, 1.0, 2),
        round(run.resident / 1e6),
    ]


def first_token_part(asked: argparse.Namespace, todo: Sequence[Task], logs: Path) -> tuple[Any, str, bool]:
    text = [token for task in todo for token in task.ids]
    found: list[FirstToken] = []
    starts = dict(engines(asked, logs))
    for name in (AUTO, "llama plain"):
        if name in starts:
            with starts[name](2) as server:
                found.append(first_token(server, text, short=asked.short, long=asked.long, times=asked.times))
    rows = [
        [
            *(f.engine, 1e3 * median(f.idle_s), 1e3 * median(f.beside_s), 1e3 * max(f.beside_s)),
            *(f.ratio, f"{f.overlapped} of {len(f.beside_s)}", f.alone_s, median(f.long_s)),
        ]
        for f in found
    ]
    head = [
        *("", "idle ms", "beside ms", "worst ms", "beside / idle", "first before the long one"),
        *("long alone s", "long beside s"),
    ]
    title = f"Time to first token of {asked.short} tokens while {asked.long} tokens are read, medians.\n\n"
    return [asdict(f) | {"ratio": f.ratio} for f in found], title + results.table(head, rows), True


def overhead_part(asked: argparse.Namespace, todo: Sequence[Task], logs: Path) -> tuple[Any, str, bool]:
    found: list[Overhead] = []
    for name in (OFF, AUTO):
        speculate = name.split()[1]
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(dict(engines(asked, logs))[name](1))
            llm = stack.enter_context(
                LLM(asked.model, speculate=speculate, threads=asked.threads, max_model_len=asked.context)
            )
            found.append(overhead(server, llm, todo[: asked.answers + 1], asked.max_tokens))
    rows = [
        [
            *(f.speculate, f.tokens, sum(f.engine_s), sum(f.server_s)),
            *(f"{f.decode:+.1%}", f"{f.typical:+.1%}", f"{f.whole:+.1%}"),
            "equal" if not f.differences else f"{len(f.differences)} DIFFER",
        ]
        for f in found
    ]
    head = ["", "tokens", "engine s", "server s", "server adds", "median", "to a whole request", "texts"]
    title = "The server, from messages over HTTP, against the engine in this process, from token ids.\n\n"
    whole = [asdict(f) | {"decode": f.decode, "typical": f.typical, "whole": f.whole} for f in found]
    return whole, title + results.table(head, rows), not any(f.differences for f in found)


if __name__ == "__main__":
    main()
