"""How much memory a model will take, told from its header before anything is loaded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from paceline.drafters.loading import Host, Outlined
from paceline.drafters.registry import Spec, configure
from paceline.errors import UsageError
from paceline.models.config import blocks_of_heads
from paceline.models.memory import MAX_ROWS, CacheNeeds
from paceline.models.target import NativeTarget, free_memory
from paceline.native import trim_memory
from paceline.planning.pass_time import PassTime
from paceline.text.tokenizer import Tokenizer
from paceline.weights.source import Source

GPU_SHARE = 0.9
"""Of a GPU's memory an engine takes this much: the default of vLLM's gpu_memory_utilization."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a plan needs to know of one model, or of a head that drafts for it.

    Attributes:
        weights: bytes of its weights as they lie in memory.
        workspace: bytes that a full pass works in.
        cache: bytes of its KV cache.
        context_length: most positions it was made for.
        vocabulary: length of a row of logits.
        states: bytes of what a head is given of the target for one token; 0 for a model.
        most_waiting: bytes of that which one text may have waiting for it.
        name: as it is called in the plan.
        leave_out: what to write to do without it.
    """

    name: str
    weights: int
    workspace: int
    cache: CacheNeeds
    context_length: int
    vocabulary: int = 0
    states: int = 0
    most_waiting: int = 0
    leave_out: str = ""

    @classmethod
    def of(cls, file: Source, *, repacked: bool = True) -> Model:
        """Read a file's header.

        Args:
            repacked: count the weights as this engine keeps them; else as they are in the file.

        Raises:
            ModelFileError, UnsupportedModelError: the file cannot be run.
        """
        target = NativeTarget.outline(file)
        needs = target.needs
        heads = blocks_of_heads(file.metadata)
        stored = sum(info.nbytes for info in file.tensors.values() if not info.name.startswith(heads))
        return cls(
            name=file.path.name,
            weights=needs.weights if repacked else stored,
            workspace=needs.workspace,
            cache=needs.cache,
            context_length=target.context_limit,
            vocabulary=target.vocab_size,
        )

    @property
    def waiting(self) -> int:
        """Bytes of states on their way to a head: those that a full pass hands out, and as many that wait."""
        return 2 * MAX_ROWS * self.states

    def held(self, tokens: int, sequences: int) -> int:
        """Bytes of the cache for sequences of so many tokens, as far as it follows them."""
        return self.cache.held(min(tokens, self.context_length), sequences)

    def total(self, tokens: int, sequences: int) -> int:
        return self.weights + self.workspace + self.waiting + self.held(tokens, sequences)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model and its drafters need.

    Attributes:
        drafters: those with a network of their own; the others need next to nothing.
        runtime: bytes of everything else: interpreter, libraries, tokenizers.
    """

    target: Model
    drafters: tuple[Model, ...]
    runtime: int


def needs_of(file: Source, speculate: Spec | Sequence[Spec], *, repacked: bool = True) -> Needs:
    """Load a model and its drafters as an LLM would, but in outline.

    Args:
        speculate: as `LLM` takes it; "auto" finds what lies with the model.
        repacked: see `Model.of`.

    Raises:
        PacelineError: whatever loading them would raise, but that memory is short.
    """
    outlines: list[Outlined] = []
    target, tokenizer = NativeTarget.outline(file), Tokenizer.from_gguf(file.metadata)
    host = Host(
        tokenizer, target.vocab_size, None, measure=PassTime.measure, target=target, outlines=outlines
    )
    configure(speculate, vocab_size=target.vocab_size, identity=file.identity(), host=host)
    near = {one.path for some in host.found.values() for one in some}
    drafters = tuple(_drafter(one, target, near, repacked=repacked) for one in outlines)
    model = Model.of(file, repacked=repacked)
    file.forget_arrays()
    trim_memory()
    return Needs(model, drafters, resident())  # while all outlines are there


def _drafter(one: Outlined, target: NativeTarget, near: Set[Path], *, repacked: bool) -> Model:
    return Model(
        name=_name(one, target.lent.file.path, near),
        weights=one.needs.weights if repacked else one.stored,
        workspace=one.needs.workspace,
        cache=one.needs.cache,
        context_length=one.context_limit or target.context_limit,
        states=one.heard * target.config.width * 4,
        most_waiting=one.most_waiting,
        leave_out="--speculate auto:find=false" if near else "",
    )


def _name(one: Outlined, target: Path, near: Set[Path]) -> str:
    what = "draft model" if one.kind == "model" else f"{one.kind} head"
    if one.path == target:
        return f"{what} in the model's own files"
    return f"{what} {one.path.name}" + (", found beside the model" if one.path in near else "")


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
    notes: what to know all the same.
    """

    parts: tuple[Part, ...]
    total: int
    available: int
    context: int
    sequences: int
    largest_context: int
    advice: tuple[str, ...]
    notes: tuple[str, ...] = ()

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
        context: tokens of one sequence; None means as many as the target was made for and memory holds.
        sequences: of that length, held at the same time.

    Raises:
        UsageError: a context the target was not made for.
    """
    longest = target.context_length
    if context is not None and not 1 <= context <= longest:
        raise UsageError(
            f"--max-model-len is {context}", f"give a value from 1 to {longest}, the model's own limit"
        )
    models = [target, *drafters]
    fixed = [Part("runtime", runtime)]
    for model in models:
        fixed.append(Part(f"weights of {model.name}", model.weights))
        fixed.append(Part(f"workspace of {model.name}", model.workspace))
        fixed += [Part(f"states for {model.name}", model.waiting)] if model.states else []
    left = available - sum(part.bytes for part in fixed)
    largest = bisect_right(
        range(1, longest + 1), left, key=lambda n: sum(model.held(n, sequences) for model in models)
    )
    chosen = context or largest or min(longest, 1)
    cache = [Part(f"KV cache of {m.name}", m.held(chosen, sequences)) for m in models]
    parts = (*fixed, *cache)
    total = sum(part.bytes for part in parts)
    advice = () if total <= available else _advice(models, total - available, chosen, largest, sequences)
    notes = tuple(note for drafter in drafters for note in _notes(drafter, chosen))
    return MemoryPlan(parts, total, available, chosen, sequences, largest, advice, notes)


def _notes(drafter: Model, context: int) -> Iterator[str]:
    if context > drafter.context_length:
        yield f"beyond {drafter.context_length} tokens of text the {drafter.name} is silent"
    most = min(context * drafter.states, drafter.most_waiting)
    if most > MAX_ROWS * drafter.states:
        yield (
            f"the states of {MAX_ROWS} tokens are counted as waiting for the {drafter.name}; those of a long "
            f"prompt wait until it first drafts, {most / 2**20:.0f} MiB at most"
        )


def _advice(
    models: Sequence[Model], missing: int, context: int, largest: int, sequences: int
) -> tuple[str, ...]:
    """What would make it fit, the mildest change first."""
    found = []
    if largest:
        found.append(f"lower --max-model-len to {largest}")
    if sequences > 1 and largest:
        found.append(f"hold fewer than {sequences} sequences at a time")
    found += _fewer(models[1:], missing, context, sequences)
    found.append(f"take a smaller quantisation or model: {missing / 2**20:.0f} MiB are missing")
    return tuple(found)


def _fewer(drafters: Sequence[Model], missing: int, context: int, sequences: int) -> Iterator[str]:
    """Which drafter to leave out: the smallest that is enough, else all if that is."""
    sizes = sorted((one.total(context, sequences), one.name, one.leave_out) for one in drafters)
    enough = [one for one in sizes if one[0] >= missing][:1] or sizes
    size = sum(size for size, _, _ in enough)
    if enough and size >= missing:
        names = " and the ".join(name for _, name, _ in enough)
        how = f" ({enough[0][2]})" if enough[0][2] else ""
        yield (
            f"do without the {names}{how}, {size / 2**20:.0f} MiB; n-gram and suffix drafting need no memory "
            "to speak of"
        )


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
