"""Block drafters on a tiny target: loaded, heard, and watched by their oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core import Context, Draft, Drafter, SamplingParams
from paceline.drafters.checkpoint import open_checkpoint
from paceline.drafters.dflash import BlockDrafter, load
from paceline.drafters.head_loading import HeadOptions
from paceline.drafters.loading import Host
from paceline.models.target import NativeTarget
from paceline.tools.profile import rows_at
from paceline.weights.gguf import GGUFFile
from support.block_heads import BlockOracle, TinyHead
from support.draft_models import FixedCosts
from support.engines import TOKENIZER
from support.gguf_writer import Tensor, write_gguf
from support.planners import FixedPlanner
from support.tiny_models import TinyModel

Array = NDArray[Any]

MODEL = TinyModel(
    architecture="qwen3", width=64, hidden=96, heads=4, kv_heads=2, head_dim=32, vocab=262, layers=4, seed=7
)
NONE = (False, False)


@dataclass
class Case:
    """A checkpoint, and what it means: whether the anchor's slot predicts, which layers are causal."""

    head: TinyHead
    first: bool = False
    causal: Sequence[bool] = NONE


def write_target(path: Path) -> Path:
    """A model whose states differ from token to token: embeddings larger than what layers add."""
    if not path.exists():
        tensors = MODEL.tensors()
        table = np.frombuffer(tensors["token_embd.weight"].raw, np.float32).reshape(MODEL.vocab, MODEL.width)
        tensors["token_embd.weight"] = Tensor.of(8 * table)
        write_gguf(path, MODEL.metadata(), tensors)
    return path


def target_at(tmp_path: Path, **options: Any) -> NativeTarget:
    file = GGUFFile.open(write_target(tmp_path / "target.gguf"))
    return NativeTarget.load(file, threads=2, **{"max_model_len": 512, **options})


def table_of(target: NativeTarget) -> Array:
    """[V, width] embedding and head of the tiny target."""
    raw = target.lent.file.data("token_embd.weight").view(np.float32)
    return raw.reshape(MODEL.vocab, MODEL.width).astype(np.float64)


def load_head(path: Path, target: Any, *, dtype: str = "f32", **options: Any) -> BlockDrafter:
    host = Host(TOKENIZER, MODEL.vocab, 2, measure=lambda _: FixedCosts(), target=target)
    return load(open_checkpoint(path, dtype), host, HeadOptions(**options))


def oracle_for(case: Case, path: Path, target: NativeTarget) -> BlockOracle:
    table = table_of(target)
    return BlockOracle(path, table, table, first=case.first, causal=case.causal)


def random_states(count: int, taps: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(count, MODEL.width)).astype(np.float32) for _ in range(taps)]


def wide(states: Sequence[Array]) -> list[Array]:
    return [one.astype(np.float64) for one in states]


def furthest(found: Array, wanted: Array) -> float:
    """Largest difference, relative to the largest logit."""
    known = np.isfinite(wanted)
    assert (np.isfinite(found) == known).all()
    return float(np.abs(found[known] - wanted[known]).max() / np.abs(wanted[known]).max())


class Checked(FixedPlanner):
    """Compares every draft of a greedy request with the oracle's, on states computed from scratch."""

    def __init__(
        self, drafter: BlockDrafter, oracle: BlockOracle, witness: NativeTarget, length: int
    ) -> None:
        super().__init__(drafter, length)
        self.oracle, self.witness = oracle, witness
        self.known: dict[int, int] = {}
        self.agreed = 0

    def _ask(self, drafter: Drafter, context: Context, budget: int) -> Draft:
        draft = super()._ask(drafter, context, budget)
        assert isinstance(drafter, BlockDrafter)
        drafter.cache.kv.check_integrity()
        if len(draft):
            base = drafter._seats[context.request].track.base
            wanted = self.expected(drafter, context.tokens, base, len(draft))
            assert draft.tokens == wanted
            assert draft.parents == list(range(-1, len(draft) - 1))
            self.agreed += 1
            self.known[context.request] = base
        return draft

    def expected(self, drafter: BlockDrafter, tokens: Sequence[int], base: int, count: int) -> list[int]:
        config = drafter.model.config
        self.witness.listen(drafter.layers)
        rows = rows_at(self.witness, 0, len(tokens) - 1, 1)
        rows.tokens = np.asarray(tokens[:-1], np.int32)
        hidden = self.witness.forward(rows).hidden
        states = wide([hidden[tap][base:] for tap in config.taps])
        return self.oracle.say(self.oracle.features(states), tokens[-1], count).tokens


def checked(case: Case, tmp_path: Path, length: int, **options: Any) -> Checked:
    witness = target_at(tmp_path)
    path = case.head.write(tmp_path / "head")
    drafter = load_head(path, witness, **options)
    return Checked(drafter, oracle_for(case, path, witness), witness, length)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


PROMPT = [random.Random(1).randrange(250) for _ in range(75)]


@dataclass
class Small:
    """A target that lends everything, with few pages for a drafter."""

    target: NativeTarget
    pages: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 20]),
        top_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        logit_bias=rng.choice([{}, {4: 2.0, 17: -3.0}]),
        ignore_eos=rng.random() < 0.5,
        seed=rng.getrandbits(40),
        max_tokens=rng.choice([1, 5, 18]),
    )


def heard(drafter: BlockDrafter, request: int, params: SamplingParams | None = None) -> Context:
    tokens = PROMPT[request : request + 40]
    context = Context(request, tokens, 40, params=params or greedy(100))
    states = random_states(39, len(drafter.layers), seed=request)
    drafter.hear(context, 0, dict(zip(drafter.layers, states, strict=True)))
    return context
