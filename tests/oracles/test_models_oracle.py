"""Whole models against transformers in float32 on the same dequantised weights.

The demo model is always compared; ORACLE_MODELS names a folder that may also hold qwen.gguf
(Qwen2.5-Coder-0.5B-Instruct).
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from oracles.model_references import LLAMA_3, TransformersModel, llama_3_factors
from oracles.record_models import GREEDY, TINY, prompts
from paceline.models.target import NativeTarget
from paceline.text.tokenizer import Tokenizer
from paceline.weights.gguf import GGUFFile
from support.passes import greedy, random_tokens, run_in_chunks, table_of
from support.reference_decoder import ReferenceDecoder
from support.tiny_models import TinyModel
from support.zoo import LENGTH, ZOO

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", ZOO)
def test_tiny_models(name: str, tmp_path: Path) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    _compare(path, TransformersModel(path), ZOO[name].vocab, dynamic="dynamic" in name)


def test_llama_3_scaling(tmp_path: Path) -> None:
    """The factors that a converter writes mean what transformers computes from the parameters."""
    model = TinyModel(head_dim=64, width=128, rope_factors=llama_3_factors(64, 10000.0))
    assert model.rope_factors is not None
    assert model.rope_factors[0] == pytest.approx(1.0)
    assert model.rope_factors[-1] == pytest.approx(8.0)
    path = model.write(tmp_path / "model.gguf")
    _compare(path, TransformersModel(path, LLAMA_3), model.vocab)


def _compare(path: Path, reference: TransformersModel, vocab: int, *, dynamic: bool = False) -> None:
    """Both our kernels and the tests' own reference decoder."""
    tokens = random_tokens(LENGTH, vocab)
    expected = reference.logits(tokens)
    assert expected.std() > 0.3
    assert np.abs(ReferenceDecoder(path).logits(tokens) - expected).max() < 1e-4
    target = NativeTarget.load(GGUFFile.open(path), threads=2, max_model_len=len(tokens))
    got = run_in_chunks(target, tokens, [150, 1, 8], table_of(target))
    # The cache holds keys and values in half precision, which is most of the distance.
    assert np.abs(got - expected).max() < 5e-3
    assert np.sqrt(np.mean((got - expected) ** 2)) < 1e-3
    if not dynamic:  # transformers turns earlier keys otherwise than later ones once such a text grows
        assert greedy(target, tokens[:200], 24) == reference.greedy(tokens[:200], 24)


@pytest.mark.parametrize("name", ZOO)
def test_recorded_values_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    recorded = json.loads(TINY.read_text())[name]
    reference = TransformersModel(ZOO[name].write(tmp_path / "model.gguf"))
    tokens = random_tokens(LENGTH, ZOO[name].vocab)
    assert reference.logits(tokens)[-1] == pytest.approx(recorded["logits"], abs=1e-4)
    assert reference.greedy(tokens, len(recorded["greedy"])) == recorded["greedy"]


def test_recorded_texts_are_those_of_transformers(smollm2_path: Path) -> None:
    recorded = json.loads(GREEDY.read_text())
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(smollm2_path).metadata)
    reference = TransformersModel(smollm2_path)
    assert sum(len(entry["output"]) for entry in recorded.values()) > 100
    for name, entry in recorded.items():
        assert entry["prompt"] == tokenizer.encode(prompts()[name])
        assert reference.greedy(entry["prompt"], len(entry["output"])) == entry["output"]


def test_likelihood_of_a_text(smollm2_path: Path) -> None:
    """Within a hundredth of a nat per token; benchmarks/quality.py measures more models and a longer text."""
    got = _quality().compare(smollm2_path, 4096)
    assert abs(got["difference"]) < 0.01
    assert got["divergence"] < 0.02
    assert got["same_argmax"] > 0.9


def test_likelihood_of_a_text_on_qwen() -> None:
    path = Path(os.environ.get("ORACLE_MODELS", "")) / "qwen.gguf"
    if not path.is_file():
        pytest.skip("ORACLE_MODELS names no folder with qwen.gguf")
    got = _quality().compare(path, 2048)
    assert abs(got["difference"]) < 0.01
    assert got["divergence"] < 0.01


def _quality() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "quality.py"
    spec = importlib.util.spec_from_file_location("quality", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
