"""Random heads and block drafters in GGUF files, and what llama.cpp drafts with them; see record_llama_heads.

llama-server tells in its log the three likeliest tokens of each place of a draft, and their shares among ten.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oracles.text_references import llama_server
from support import tiny_tokenizer
from support.block_gguf import write_block_gguf
from support.block_heads import TinyHead as TinyBlock
from support.eagle_gguf import write_eagle3_gguf
from support.gguf_writer import write_gguf
from support.tiny_heads import TinyHead
from support.tiny_models import TinyModel

VOCAB = tiny_tokenizer.VOCAB_SIZE
TOKENIZER = tiny_tokenizer.metadata()
MODEL = TinyModel(
    width=64, hidden=96, heads=4, kv_heads=2, head_dim=32, vocab=VOCAB, layers=8, tied=False, seed=3
)
PROMPT = [66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 10, 11, 12]
WORDS = 16
SHARED = 10
"""How many likeliest tokens share what llama.cpp gives out as chances."""


@dataclass(frozen=True)
class LlamaCase:
    """A file and how llama.cpp is told to draft with it.

    Attributes:
        write: writes it for a seed.
        kind: of --spec-type.
    """

    write: Callable[[Path, int], Path]
    kind: str
    count: int = 4


def target_at(path: Path) -> Path:
    return write_gguf(path, {**MODEL.metadata(), **TOKENIZER}, MODEL.tensors())


def _eagle3() -> dict[str, LlamaCase]:
    plain = TinyHead(vocab=VOCAB, taps=(2, 4, 5), draft_vocab=100, head_dim=32)
    heads = {
        "some ids": plain,
        "all ids": replace(plain, draft_vocab=0),
        "both norms": replace(plain, norm_before_fc=True, norm_before_residual=True, taps=(1, 5, 7)),
    }

    def case(head: TinyHead) -> LlamaCase:
        ids = head.kept if head.draft_vocab else None
        return LlamaCase(
            lambda path, seed: write_eagle3_gguf(path, replace(head, seed=seed), ids, TOKENIZER),
            "draft-eagle3",
        )

    return {f"EAGLE-3, {name}": case(head) for name, head in heads.items()}


def _blocks() -> dict[str, LlamaCase]:
    plain = TinyBlock(vocab=VOCAB, target_layers=8, taps=(0, 3, 5))
    spark = replace(plain, markov="vanilla", confidence=True)
    mixed = replace(plain, sliding=(0,), window=20)
    heads: dict[str, tuple[TinyBlock, dict[str, Any]]] = {
        "DFlash, all ids": (plain, {}),
        "DFlash, some ids": (replace(plain, draft_vocab=100), {}),
        "DFlash, causal": (plain, {"causal": True}),
        "DFlash, a window": (mixed, {}),
        "DFlash, a window, causal": (mixed, {"causal": True}),
        "DSpark": (spark, {"first": True}),
        "DSpark, bonus anchor": (spark, {}),
        "DSpark, no confidence head": (replace(spark, confidence=None, own=True), {"first": True}),
    }

    def case(head: TinyBlock, options: dict[str, Any]) -> LlamaCase:
        keys = {**TOKENIZER, "vocab_size": VOCAB, "rope.dimension_count": head.head_dim}
        options = {"first": False, **options}
        return LlamaCase(
            lambda path, seed: write_block_gguf(path, replace(head, seed=seed), keys=keys, **options),
            "draft-dspark" if head.markov else "draft-dflash",
            5 if options["first"] else 4,
        )

    return {name: case(*its) for name, its in heads.items()}


CASES: dict[str, LlamaCase] = {**_eagle3(), **_blocks()}


@dataclass(frozen=True)
class Told:
    """What llama.cpp drafted behind a text: of each place the likeliest ids and their shares."""

    length: int
    places: list[list[tuple[int, float]]]

    @property
    def drafts(self) -> list[int]:
        return [place[0][0] for place in self.places]


_LINE = re.compile(rb"draft candidate +(\d+), pos +-?(\d+): +(\d+) \( +([\d.]+)\)")


def played(case: LlamaCase, folder: Path, seed: int) -> tuple[list[int], list[Told]]:
    """The text that llama.cpp wrote, and what it drafted on the way."""
    log = folder / "log"
    options = ["--model-draft", str(case.write(folder / "head.gguf", seed)), "--spec-type", case.kind]
    options += ["--spec-draft-n-max", str(case.count), "-lv", "10", "-np", "1", "-fa", "off"]
    options += [part for name in ("-ctk", "-ctv", "-ctkd", "-ctvd") for part in (name, "f32")]
    body = {"prompt": PROMPT, "n_predict": WORDS, "temperature": 0.0, "top_k": 1, "ignore_eos": True}
    with llama_server(target_at(folder / "target.gguf"), 256, options, log) as server:
        reply = server.ask("/completion", {**body, "cache_prompt": False, "return_tokens": True})
    text = [*PROMPT, *reply["tokens"]]
    told, length = [], len(PROMPT) + 1
    for places in _drafts(log.read_bytes()):
        if length >= len(text):
            break
        told.append(Told(length, places))
        length += 1 + _taken(told[-1].drafts, text[length:])
    return text, told


def _drafts(log: bytes) -> list[list[list[tuple[int, float]]]]:
    found: list[list[list[tuple[int, float]]]] = []
    before = 0
    for rank, place, token, share in _LINE.findall(log):
        if rank == b"0":
            if not found or int(place) <= before:
                found.append([])
            found[-1].append([])
            before = int(place)
        found[-1][-1].append((int(token), float(share)))
    return found


def _taken(drafts: list[int], written: list[int]) -> int:
    pairs = enumerate(zip(drafts, written, strict=False))
    return next((i for i, (one, two) in pairs if one != two), min(len(drafts), len(written)))
