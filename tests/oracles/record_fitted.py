"""Trains the tiny target on this repository's own text, fits a head of each kind to it, and records them all.

    PYTHONPATH=tests python -m oracles.record_fitted [--heads-only]

Run in the oracle environment; the target takes a quarter of an hour on one core, each head a minute or two.
transformers trains the target, so that nothing of ours decides what its states are.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import LLM, SamplingParams
from paceline.training.fit import Recipe, fit
from paceline.training.head import Head
from paceline.training.kinds import new_head, taps_of
from paceline.training.layers import Shape
from paceline.training.teacher import Teacher
from paceline.training.transcripts import Transcript, write
from support.fitted import FITTED, KINDS, Tiny
from support.folders import tiny_tokenizer_json

_log = logging.getLogger("fitted")
ROOT = Path(__file__).parents[2]
VOCABULARY, PROMPTS = 258, 300
HEAD_STEPS = {"eagle": 900, "eagle3": 2400, "mtp": 1500, "dflash": 1200, "dspark": 1200}
STEPS, WINDOW, TEXTS, RATE = 3000, 192, 16, 4e-3


def corpus() -> bytes:
    """Documentation and sources of this repository."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/paceline/**/*.py")]
    return b"".join(file.read_bytes() for file in sorted(files))


def train_target(folder: Path) -> None:
    """A llama of eight layers over bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=1024,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=256,
            eos_token_id=257,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )
    data, rng = np.frombuffer(corpus(), np.uint8).astype(np.int64), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.monotonic()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            fall = 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
            group["lr"] = RATE * min((step + 1) / 100, fall)
        starts = rng.integers(0, len(data) - WINDOW - 1, TEXTS)
        tokens = torch.from_numpy(np.stack([data[at : at + WINDOW] for at in starts]))
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            spent = time.monotonic() - started
            left = spent / (step + 1) * (STEPS - step - 1)
            _log.info("target, step %d of %d: loss %.3f, %.0f s left", step + 1, STEPS, loss.item(), left)
    model.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json(VOCABULARY)))


def pick_prompts(file: Path, seed: int = 0) -> None:
    """Record pieces of the corpus, 16 bytes each, since fits must not change with every commit."""
    data, rng = corpus(), np.random.default_rng(seed)
    starts = rng.integers(0, len(data) - 16, PROMPTS).tolist()
    file.write_text(json.dumps([data[at : at + 16].decode("latin-1") for at in starts], indent=0) + "\n")


def texts_of(llm: LLM, count: int, layers: Sequence[int], *, tokens: int = 224) -> list[Transcript]:
    """Texts of the target, a third of them greedy."""
    params = [
        SamplingParams(temperature=(0.0, 0.8, 1.0)[i % 3], seed=i, max_tokens=tokens, ignore_eos=True)
        for i in range(count)
    ]
    prompts = [list(text.encode("latin-1")) for text in json.loads((FITTED / "prompts.json").read_text())]
    return write(llm, prompts[:count], params, layers)


def tiny_head(kind: str, teacher: Teacher, texts: Sequence[Transcript], seed: int = 0) -> Head:
    """A new head of a kind, of the sizes recorded."""
    shape = Shape.of(teacher.config)
    if kind == "eagle3":
        return new_head(kind, teacher, texts, draft_vocab=64, seed=seed)
    if kind in ("dflash", "dspark"):  # normalised heads come in multiples of 32
        return new_head(
            kind, teacher, texts, shape=replace(shape, heads=2, kv_heads=1, head_dim=32), seed=seed
        )
    return new_head(kind, teacher, texts, seed=seed)


def all_taps(depth: int) -> list[int]:
    """Whatever any head reads."""
    return sorted({tap for kind in KINDS for tap in taps_of(kind, depth)} | {depth})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads-only", action="store_true")
    parser.add_argument("--kinds", default=",".join(KINDS))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if not arguments.heads_only:
        shutil.rmtree(FITTED / "target", ignore_errors=True)
        train_target(FITTED / "target")
        pick_prompts(FITTED / "prompts.json")
    llm = LLM(FITTED / "target", threads=1, max_model_len=512, speculate="off")
    teacher = Teacher(llm.engine.target)
    texts = texts_of(llm, PROMPTS, all_taps(teacher.depth))
    _log.info("%d tokens written", sum(map(len, texts)))
    tiny = Tiny()
    for kind in arguments.kinds.split(","):
        head = tiny_head(kind, teacher, texts)
        fit(head, texts, Recipe(steps=HEAD_STEPS[kind], rate=4e-3), _log.info)
        head.save(FITTED / kind)
        _log.info("%s: keeps %.3f tokens a pass", kind, tiny.kept(tiny.drafter(kind, FITTED / kind)))


if __name__ == "__main__":
    main()
