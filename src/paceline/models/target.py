"""A model file as a `Target`: loads it, keeps its cache arrays, runs its passes."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from paceline.core import Floats, Ids, Output, Rows, WindowPages, is_whole
from paceline.errors import ModelFileError, ResourceError, UsageError, suggest
from paceline.models import decoder
from paceline.models.config import DecoderConfig, blocks_of_heads
from paceline.models.memory import MAX_ROWS, PAGE_SIZE, CacheNeeds, MemoryNeeds
from paceline.models.tally import Tally, Unread
from paceline.models.tensors import Tensors
from paceline.native import Program, instruction_sets
from paceline.weights.source import Source

_SPARE = 1.15  # tokenizer, drafters and interpreter beside the program


@dataclass(frozen=True, slots=True)
class Lent:
    """What a drafter that was made for a model takes from it instead of holding it twice.

    Attributes:
        program: whose weight `head` is; a program that adopts it must not outlive this one.
        file: holds the embedding.
        head: handle of the matrix [vocab, width] that makes logits.
        final_norm: [width] weights of the norm before it.
    """

    program: Program
    file: Source
    head: int
    final_norm: Floats
    config: DecoderConfig


class NativeTarget:
    """A model that runs on the CPU kernels; implements `core.Target`.

    Attributes:
        pages: cache pages there are; memory is only taken as they are first written.
        window: the pages of layers with a sliding window, None if there are no such layers.
        cache: bytes that it takes.
        weight_bytes: bytes of weights that a one-row pass reads.
        isa: the kernel set in use.
        heard: layers whose inputs every pass returns; see `listen`.
        lent: what drafters that were made for this model share with it.
    """

    page_size = PAGE_SIZE
    max_rows = MAX_ROWS

    def __init__(
        self,
        program: Program,
        config: DecoderConfig,
        lent: Lent,
        *,
        vocab_size: int,
        context_limit: int,
        pages: int,
        window_pages: int,
    ) -> None:
        self._program = program
        self.config = config
        self.vocab_size = vocab_size
        self.context_limit = context_limit
        self.pages = pages
        self.cache = CacheNeeds.of(config)
        self.window = window_of(program, self.cache.window, window_pages, MAX_ROWS)
        self.threads: int = program.threads
        self.isa: str = program.isa
        self.weight_bytes: int = program.weight_bytes
        self.heard: tuple[int, ...] = ()
        self.lent = lent
        self._logits: Floats = np.empty((0, vocab_size), np.float32)

    @classmethod
    def load(
        cls,
        file: Source,
        *,
        threads: int | None = None,
        max_model_len: int | None = None,
        pages: int | None = None,
        isa: str | None = None,
    ) -> NativeTarget:
        """Repack a file's weights and record its passes.

        Args:
            threads: None means one per physical core.
            max_model_len: most tokens of one sequence; None means the model's own limit, or as much as
                memory holds.
            pages: cache pages of 32 positions; None means room for one longest sequence and a quarter
                more for prefixes kept from earlier calls.
            isa: kernel set, "avx512bf16", "avx512", "avx2" or "portable"; None means PACELINE_ISA or the
                best there is.

        Raises:
            UsageError: an option that cannot be met.
            ModelFileError, UnsupportedModelError: the file cannot be run.
            ResourceError: it does not fit the memory that is free.
        """
        config, needs = _config(file), cls.outline(file).needs
        context, left = _context(config, max_model_len, needs.weights + needs.workspace)
        window_pages = _window_pages(pages, context, needs.cache, left)
        pages = _pages(pages, context)
        program = _program(
            config, threads=_threads(threads), isa=_isa(isa), pages=pages, window_pages=window_pages
        )
        return cls._recorded(file, Tensors(file, program), program, config, context, pages, window_pages)

    @classmethod
    def outline(cls, file: Source, *, max_model_len: int | None = None) -> NativeTarget:
        """What `load` would make of a file, however much memory there is: for telling what that takes.

        It reads no weights, and its passes do nothing.
        """
        config = _config(file)
        context = _own_context(config, max_model_len)
        pages = _pages(None, context)
        window_pages = _window_pages(None, context, CacheNeeds.of(config), None)
        tally = cast(Program, Tally(max_rows=MAX_ROWS))
        return cls._recorded(file, Tensors(Unread(file), tally), tally, config, context, pages, window_pages)

    @classmethod
    def _recorded(
        cls,
        file: Source,
        tensors: Tensors,
        program: Program,
        config: DecoderConfig,
        context: int,
        pages: int,
        window_pages: int,
    ) -> NativeTarget:
        vocab = _vocabulary(file)
        head = decoder.record(program, tensors, config, vocab=vocab, context=context)
        lent = Lent(program, file, head, tensors.values("output_norm.weight", config.width), config)
        tensors.refuse_leftovers(besides=blocks_of_heads(file.metadata))
        return cls(
            program,
            config,
            lent,
            vocab_size=vocab,
            context_limit=context,
            pages=pages,
            window_pages=window_pages,
        )

    @property
    def needs(self) -> MemoryNeeds:
        """What it would take; of an outline only. An embedding with a head of its own stays in the file."""
        return MemoryNeeds.of(self._program, self.cache)

    def listen(self, layers: Sequence[int]) -> None:
        """Have every pass return what enters these layers, in `Output.hidden`; () ends it.

        Args:
            layers: 0 for the embedding up to `layers`, what the final norm is given; ascending.

        Raises:
            UsageError: there is no such layer.
        """
        for layer in layers:
            if not 0 <= layer <= self.config.layers:
                raise UsageError(
                    f"a drafter asks for the input of layer {layer}; the model has {self.config.layers}",
                    "it was made for another model",
                )
        self.heard = tuple(layers)
        self._program.listen(list(layers))

    def forward(self, rows: Rows) -> Output:
        """Run one pass; see `core.Target`.

        Raises:
            ModelFileError: no logit of a row is a number.
        """
        count = len(rows.wanted)
        argmax: Ids = np.empty(count, np.int32)
        logits = self._logits_for(count) if rows.logits else None
        hidden = self._hidden_for(len(rows.tokens)) if self.heard else None
        self._program.run(
            rows.tokens,
            rows.positions,
            rows.slots,
            rows.parents,
            rows.sequences,
            rows.tables,
            rows.wanted,
            argmax,
            logits,
            hidden,
            window_tables=rows.window_tables,
        )
        if count and argmax.min() < 0:
            raise ModelFileError(
                "the model's numbers overflow: no logit is a number",
                "the file is damaged, or its tuning failed",
            )
        found = Output(argmax, None if logits is None else logits[:count])
        if hidden is not None:
            width = self.config.width
            found.hidden = {
                layer: hidden[:, i * width : (i + 1) * width] for i, layer in enumerate(self.heard)
            }
        return found

    def op_times(self, rows: Rows) -> dict[str, float]:
        """Run one pass and return the seconds that each kind of operation in it took."""
        self._program.time_ops(True)
        try:
            self.forward(rows)
            return dict(self._program.timings())
        finally:
            self._program.time_ops(False)

    def move(
        self,
        table: Ids,
        sources: Sequence[int],
        targets: Sequence[int],
        window_table: Ids | None = None,
    ) -> None:
        """Copy cache entries from slot to slot of one sequence, in order."""
        self._program.move(table, np.asarray(sources, np.int32), np.asarray(targets, np.int32), window_table)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a whole cache page of the layers that see everything."""
        self._program.copy_page(source, target)

    def _hidden_for(self, count: int) -> Floats:
        """New for each pass: whoever hears them may keep them."""
        return np.empty((count, len(self.heard) * self.config.width), np.float32)

    def _logits_for(self, count: int) -> Floats:
        if len(self._logits) < count:
            self._logits = np.empty((count, self.vocab_size), np.float32)
        return self._logits


def _config(file: Source) -> DecoderConfig:
    if "general.architecture" not in file.metadata:
        raise ModelFileError(
            "the file does not name its architecture", "it is no model; check what was downloaded"
        )
    config = DecoderConfig.from_metadata(file.metadata)
    _vocabulary(file)
    return config


def _vocabulary(file: Source) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise ModelFileError(
            "the file has no token embedding", "it is incomplete; convert or download it again"
        )
    return info.shape[0]


def _program(config: DecoderConfig, *, threads: int, isa: str, pages: int, window_pages: int) -> Program:
    try:
        return Program(
            threads=threads,
            isa=isa,
            max_rows=MAX_ROWS,
            page_size=PAGE_SIZE,
            pages=pages,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            windowed=[window > 0 for window in config.windows],
            window_pages=window_pages,
        )
    except RuntimeError as error:
        raise ResourceError(f"{threads} threads cannot be started: {error}", "lower threads") from error
    except MemoryError as error:
        raise ResourceError(
            f"a cache of {pages * PAGE_SIZE} tokens cannot be had", "lower max_model_len"
        ) from error


def _pages(wanted: int | None, context: int) -> int:
    if wanted is None:
        return -(-context * 5 // (4 * PAGE_SIZE)) + 2
    if not is_whole(wanted) or wanted < 1:
        raise UsageError(f"pages is {wanted!r}", "give a whole number from 1")
    return wanted


def _window_pages(wanted: int | None, context: int, cache: CacheNeeds, left: int | None) -> int:
    """Pages of layers with a window: as many as of the others, which many short texts can use, if memory
    allows; else enough for one long text and a quarter more."""
    pages = _pages(wanted, context)
    if not cache.window or wanted is not None or left is None:
        return pages if cache.window else 0
    affordable = (left // PAGE_SIZE - pages * cache.per_token) // cache.window_per_token
    return min(pages, max(affordable, _pages(None, cache.window_tokens)))


def window_of(program: Program, size: int, pages: int, rows: int) -> WindowPages | None:
    """What a program's cache says of its layers with a window; None if `size` is 0."""

    def copy_page(source: int, target: int) -> None:
        program.copy_page(source, target, windowed=True)

    return WindowPages(size, pages, rows, copy_page) if size else None


def _own_context(config: DecoderConfig, wanted: int | None) -> int:
    """Longest sequence, as asked or as the model allows."""
    if wanted is not None and not (is_whole(wanted) and 2 <= wanted <= config.context_length):
        raise UsageError(f"max_model_len is {wanted!r}", f"give a value from 2 to {config.context_length}")
    return wanted or config.context_length


def _context(config: DecoderConfig, wanted: int | None, program_bytes: int) -> tuple[int, int | None]:
    """Longest sequence, as asked or as the model and the free memory allow; and bytes left for the cache."""
    longest, free = _own_context(config, wanted), free_memory()
    if free is None:
        return longest, None
    left, cache = int(free - program_bytes * _SPARE), CacheNeeds.of(config)
    fits = bisect_right(range(1, config.context_length + 1), left, key=lambda n: cache.held(n * 5 // 4))
    least = wanted or min(config.context_length, 2 * PAGE_SIZE)
    if fits < least:
        raise ResourceError(
            f"the model needs {program_bytes * _SPARE / 2**20:.0f} MiB and {least} tokens of cache "
            f"{cache.held(least * 5 // 4) / 2**20:.0f} MiB more; {free / 2**20:.0f} MiB are free",
            "close other programs, lower max_model_len, or take a smaller quantisation",
        )
    return wanted or fits, left


def free_memory() -> int | None:
    """Bytes the system could hand out now, or None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if "kB" in line}.get(
        "MemAvailable"
    )
    room = [bytes_ for bytes_ in (free, cgroup_room(Path("/sys/fs/cgroup"))) if bytes_ is not None]
    return min(room, default=None)


def cgroup_room(folder: Path) -> int | None:
    """Bytes left to a version 2 control group, file pages counted as free since they can be dropped."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        dropped = int(stat["inactive_file"]) + int(stat["active_file"])
    except (OSError, ValueError, KeyError):
        return None
    return int(limit) - used + dropped if limit.isdigit() else None


def _threads(wanted: int | None) -> int:
    if wanted is None:
        return physical_cores()
    if not is_whole(wanted) or not 1 <= wanted <= 256:
        raise UsageError(
            f"threads is {wanted!r}", "give a value from 1 to 256; None means one per physical core"
        )
    return wanted


def physical_cores() -> int:
    """Physical cores this process may run on; threads that share a core would only share its units."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        try:
            siblings = (
                Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
            )
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return max(1, len(cores))


def _isa(wanted: str | None) -> str:
    name = wanted or os.environ.get("PACELINE_ISA") or "auto"
    known = ["auto", "avx512bf16", "avx512", "avx2", "portable"]
    if name not in known:
        raise UsageError(f"kernel set {name!r} does not exist", suggest(name, known))
    if name != "auto" and name not in instruction_sets():
        raise ResourceError(
            f"this CPU cannot run the {name} kernels", f"use one of: {', '.join(instruction_sets())}"
        )
    return name
