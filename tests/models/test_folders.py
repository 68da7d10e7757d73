"""Folders of every family against what transformers computed, and against GGUF files of the same weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from make_folder import make

from oracles.folder_references import FOLDERS
from oracles.record_folders import EVERY, POSITIONS, RECORDED, TEXT, prompt
from paceline.core import Floats
from paceline.models.target import NativeTarget
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import TensorType
from paceline.weights.source import Source, open_model
from support.folders import TinyFolder
from support.gguf_writer import Tensor, write_gguf
from support.passes import greedy, random_tokens, run_in_chunks, table_of
from support.tiny_models import TinyModel
from support.tiny_tokenizer import metadata as tokenizer_metadata

RECORDS = json.loads(RECORDED.read_text())


def test_every_folder_is_recorded() -> None:
    assert set(RECORDS) == set(FOLDERS)


@pytest.mark.parametrize("name", RECORDS)
def test_logits_and_texts_of_transformers(tmp_path: Path, name: str) -> None:
    record = RECORDS[name]
    folder = replace(FOLDERS[name], seed=record["seed"])
    target = NativeTarget.load(open_model(folder.write(tmp_path)), threads=2)
    logits = run_in_chunks(target, prompt(folder), [150, 1, 8], table_of(target))
    expected = np.array(record["logits"])
    assert expected.std() > 0.1
    assert np.abs(logits[POSITIONS, ::EVERY] - expected).max() < 1e-3
    assert greedy(target, prompt(folder)[:16], TEXT) == record["text"]


# A folder and a GGUF file of the same weights


def logits_of(source: Source) -> Floats:
    with source:
        target = NativeTarget.load(source, threads=2, max_model_len=256)
    return run_in_chunks(target, random_tokens(90, target.vocab_size), [40, 1, 8], table_of(target))


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.F16, TensorType.BF16])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_same_bits_as_a_file(tmp_path: Path, kind: TensorType, architecture: str) -> None:
    model = TinyModel(
        architecture=architecture,
        kind=kind,
        vocab=262,
        heads=4,
        kv_heads=2,
        head_dim=32,
        width=64,
        tied=False,
        # A folder has one type, so all vectors are made of values that every type holds.
        biases=False,
    )
    tensors = {
        name: tensor if len(tensor.shape) > 1 else Tensor.of(np.ones(tensor.shape))
        for name, tensor in model.tensors().items()
    }
    file = write_gguf(tmp_path / "m.gguf", model.metadata() | tokenizer_metadata(), tensors)
    make(file, tmp_path / "folder", {TensorType.F32: "f32", TensorType.F16: "f16"}.get(kind, "bf16"), 1 << 20)
    assert (logits_of(open_model(tmp_path / "folder")) == logits_of(GGUFFile.open(file))).all()


@pytest.mark.parametrize(("method", "kind"), [("q8", TensorType.Q8_0), ("q4", TensorType.Q4_0)])
def test_the_same_bits_as_a_file_of_the_rounded_weights(
    tmp_path: Path, method: str, kind: TensorType
) -> None:
    folder = TinyFolder(family="llama", dtype="BF16").write(tmp_path / "folder")
    with open_model(folder, method) as source:
        tensors = {
            name: Tensor(info.type, info.shape, source.data(name).tobytes())
            for name, info in source.tensors.items()
        }
        assert tensors["blk.0.attn_q.weight"].type is kind
        metadata = {k: v for k, v in source.metadata.items() if k.startswith(("general.arch", "llama."))}
    file = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    assert (logits_of(open_model(folder, method)) == logits_of(GGUFFile.open(file))).all()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rounding_to_eight_bits_changes_little(tmp_path: Path, family: str) -> None:
    folder = TinyFolder(family=family).write(tmp_path)
    plain = logits_of(open_model(folder))
    for method, most in (("q8", 0.05), ("q4", 0.5)):
        error = logits_of(open_model(folder, method)) - plain
        assert 0 < np.sqrt(np.mean(error**2)) < most * plain.std()


def test_a_sharded_folder_is_the_same_model(tmp_path: Path) -> None:
    whole = TinyFolder(family="qwen3").write(tmp_path / "whole")
    parts = TinyFolder(family="qwen3").write(tmp_path / "parts", shards=4)
    assert (logits_of(open_model(whole)) == logits_of(open_model(parts))).all()
