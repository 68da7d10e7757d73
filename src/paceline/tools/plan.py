"""How much memory a model will take, told from its header before anything is loaded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.models.config import DecoderConfig
from paceline.models.memory import CacheNeeds, memory_needs
from paceline.models.target import free_memory
from paceline.weights.source import Source

GPU_SHARE = 0.9
"""Of a GPU's memory an engine takes this much: the default of vLLM's gpu_memory_utilization."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a plan needs to know of one model.

    Attributes:
        weights: bytes of its weights as they lie in memory.
        workspace: bytes that a full pass works in.
        cache: bytes of its KV cache.
        context_length: most positions it was made for.
        vocabulary: length of a row of logits.
    """

    name: str
    weights: int
    workspace: int
    cache: CacheNeeds
    context_length: int
    vocabulary: int

    @classmethod
    def of(cls, file: Source, *, repacked: bool = True) -> Model:
        """Read a file's header.

        Args:
            repacked: count the weights as this engine keeps them; else as they are in the file.

        Raises:
            ModelFileError, UnsupportedModelError: the file cannot be run.
        """
        config = DecoderConfig.from_metadata(file.metadata)
        needs = memory_needs(file, config)
        stored = sum(info.nbytes for info in file.tensors.values())
        embedding = file.tensors.get("token_embd.weight")
        return cls(
            name=file.path.name,
            weights=needs.weights if repacked else stored,
            workspace=needs.workspace,
            cache=needs.cache,
            context_length=config.context_length,
            vocabulary=embedding.shape[0] if embedding else 0,
        )


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Attributes:
    parts: what the memory goes to.
    total: their sum.
    available: bytes there are.
    context: tokens of each sequence that the plan has cache for.
    sequences: sequences of that length at the same time.
    largest_context: most tokens each of them could have, 0 when not even the weights fit.
    advice: what to change when it does not fit; empty when it does.
    """

    parts: tuple[Part, ...]
    total: int
    available: int
    context: int
    sequences: int
    largest_context: int
    advice: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.total <= self.available


def plan(
    target: Model,
    *,
    available: int,
    runtime: int,
    drafters: Sequence[Model] = (),
    context: int | None = None,
    sequences: int = 1,
) -> MemoryPlan:
    """Add up what a target and its drafters take.

    Nothing is kept twice for rolling drafts back: rejected rows are forgotten in place.

    Args:
        available: bytes that may be taken.
        runtime: bytes of everything that is no model: interpreter, libraries, tokenizer.
        context: tokens of one sequence; None means as many as the models were made for and memory holds.
        sequences: of that length, held at the same time.

    Raises:
        UsageError: a context the models were not made for.
    """
    models = [target, *drafters]
    longest = min(model.context_length for model in models)
    if context is not None and not 1 <= context <= longest:
        raise UsageError(
            f"--max-model-len is {context}", f"give a value from 1 to {longest}, the models' own limit"
        )
    fixed = [Part("runtime", runtime)]
    for model in models:
        fixed.append(Part(f"weights of {model.name}", model.weights))
        fixed.append(Part(f"workspace of {model.name}", model.workspace))
    left = available - sum(part.bytes for part in fixed)
    largest = bisect_right(
        range(1, longest + 1), left, key=lambda n: sum(model.cache.held(n, sequences) for model in models)
    )
    chosen = context or largest or min(longest, 1)
    cache = [Part(f"KV cache of {m.name}", m.cache.held(chosen, sequences)) for m in models]
    parts = (*fixed, *cache)
    total = sum(part.bytes for part in parts)
    advice = () if total <= available else _advice(models, total - available, largest, sequences)
    return MemoryPlan(parts, total, available, chosen, sequences, largest, advice)


def _advice(models: Sequence[Model], missing: int, largest: int, sequences: int) -> tuple[str, ...]:
    """What would make it fit, the mildest change first."""
    found = []
    if largest:
        found.append(f"lower --max-model-len to {largest}")
    if sequences > 1 and largest:
        found.append(f"hold fewer than {sequences} sequences at a time")
    if len(models) > 1 and missing <= sum(model.weights + model.workspace for model in models[1:]):
        found.append("do without the draft model; n-gram and suffix drafting need no memory to speak of")
    found.append(f"take a smaller quantisation or model: {missing / 2**20:.0f} MiB are missing")
    return tuple(found)


def resident() -> int:
    """Bytes of memory that this process holds now."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 150 << 20
    lines = [line.split() for line in status.read_text(encoding="ascii").splitlines()]
    return next(int(line[1]) * 1024 for line in lines if line[0] == "VmRSS:")


def memory_here() -> int:
    """Bytes that a new program could take on this machine. Raises UsageError where it does not say."""
    free = free_memory()
    if free is None:
        raise UsageError("this system does not tell its free memory", "give --memory SIZE")
    return free
