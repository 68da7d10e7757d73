"""`paceline plan MODEL`"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer

from paceline.cli import terminal
from paceline.cli.loading import locate
from paceline.cli.options import Model as ModelArgument
from paceline.cli.options import Quantize, list_flag, split_specs
from paceline.cli.verb import verb
from paceline.errors import UsageError
from paceline.tools.plan import GPU_SHARE, MemoryPlan, Model, memory_here, plan, resident

_UNITS = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}


@verb
def command(
    model: ModelArgument,
    *,
    speculate: Annotated[
        list[str] | None,
        list_flag("--speculate", "--drafter", help="model:PATH, a draft model beside it; several combine"),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", "--ctx-size", "-c", min=1, help="Default: as many tokens as fit"),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", "--parallel", "-np", min=1, help="Held at the same time")
    ] = 1,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Plan for so much RAM, as in 8GiB; default: what is free")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Plan for a GPU of this size, the file's weights as they are")
    ] = None,
    quantize: Quantize = None,
    json: Annotated[bool, typer.Option("--json", help="Print one object")] = False,
) -> int:
    if memory and gpu:
        raise UsageError("--memory and --gpu were both given", "plan for one of them")
    names = [model, *_draft_models(speculate or [])]
    found = _plan(names, quantize, max_model_len, max_num_seqs, memory, gpu)
    if json:
        terminal.write_json(asdict(found) | {"fits": found.fits})
    else:
        _show(found)
    return 0 if found.fits else 1


def _draft_models(specs: list[str]) -> list[str]:
    """The models among drafters; the other drafters need no memory to speak of."""
    names = [spec for text in specs for spec in split_specs(text)]
    return [name.partition(":")[2].partition(",")[0] for name in names if name.startswith("model:")]


def _plan(
    names: list[str],
    quantize: str | None,
    context: int | None,
    sequences: int,
    memory: str | None,
    gpu: str | None,
) -> MemoryPlan:
    import paceline.engine  # noqa: F401  what a running model needs besides itself is in memory when measured
    from paceline.native import trim_memory
    from paceline.text.tokenizer import Tokenizer
    from paceline.weights.source import open_model

    models, tokenizers = [], []
    for name in names:
        with open_model(locate(name), quantize if name == names[0] else None) as file:
            models.append(Model.of(file, repacked=gpu is None))
            tokenizers.append(Tokenizer.from_gguf(file.metadata))
            file.forget_arrays()
    if gpu:
        available, runtime = int(_size("--gpu", gpu) * GPU_SHARE), 0
    else:
        available = _size("--memory", memory) if memory else memory_here()
        trim_memory()
        runtime = resident()
    target, *drafters = models
    return plan(
        target,
        available=available,
        runtime=runtime,
        drafters=drafters,
        context=context,
        sequences=sequences,
    )


def _size(flag: str, text: str) -> int:
    """Bytes of "8GiB", "8G", "8192MiB" or "8589934592"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", text.strip().lower())
    if match is None:
        raise UsageError(f"{flag} is {text!r}", "give a size such as 8GiB or 512MiB")
    number, unit, kind = match.groups()
    base = 1000 if kind == "b" and unit else 1024
    return int(float(number) * float(base) ** _UNITS[unit]) if unit else int(float(number))


def _show(found: MemoryPlan) -> None:
    width = max(len(part.name) for part in found.parts)
    lines = [f"{part.name:<{width}}  {part.bytes / 2**20:>10.1f} MiB" for part in found.parts if part.bytes]
    lines.append(f"{'together':<{width}}  {found.total / 2**20:>10.1f} MiB")
    lines.append(f"{'there are':<{width}}  {found.available / 2**20:>10.1f} MiB")
    each = f"{found.context} tokens" + (f", {found.sequences} times" if found.sequences > 1 else "")
    verdict = "fits" if found.fits else "does not fit"
    lines.append(f"\n{each}: {verdict}; at most {found.largest_context} tokens would")
    lines += [f"- {advice}" for advice in found.advice]
    terminal.write("\n".join(lines) + "\n")
