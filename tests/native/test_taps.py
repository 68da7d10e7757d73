"""What learned drafters need of a program: states out, features in, other sights, parts, shared weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core import Ids, Output
from paceline.errors import UsageError
from paceline.models.target import NativeTarget
from paceline.native import Program
from paceline.tools.profile import rows_at
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import TensorType
from support.tiny_models import TinyModel

MODEL = TinyModel(width=64, hidden=96, heads=4, kv_heads=2, vocab=97, layers=3)
Floats = NDArray[np.float32]


def target(tmp_path: Path, model: TinyModel = MODEL) -> NativeTarget:
    return NativeTarget.load(GGUFFile.open(model.write(tmp_path / "m.gguf")), threads=2, max_model_len=512)


def run(model: NativeTarget, start: int, count: int) -> Output:
    rows = rows_at(model, start, count, count)
    rows.logits = True
    output = model.forward(rows)
    assert output.logits is not None
    return Output(output.argmax, output.logits.copy(), {i: h.copy() for i, h in output.hidden.items()})


def test_listening_changes_no_bit_and_states_do_not_depend_on_neighbours(tmp_path: Path) -> None:
    model = target(tmp_path, MODEL)
    plain = run(model, 0, 40)
    assert plain.hidden == {}
    model.listen([0, 2, 3])
    together = run(model, 0, 40)
    np.testing.assert_array_equal(together.logits, plain.logits)
    for row in range(40):
        alone = run(model, row, 1)
        for layer in (0, 2, 3):
            np.testing.assert_array_equal(alone.hidden[layer][0], together.hidden[layer][row])
    model.listen([])
    assert run(model, 0, 4).hidden == {}


def test_the_first_state_is_the_embedding_and_the_last_makes_the_logits(tmp_path: Path) -> None:
    model = target(tmp_path)
    file = model.lent.file
    table = file.data("token_embd.weight").view(np.float32).reshape(97, 64)
    model.listen([0, MODEL.layers])
    rows = rows_at(model, 0, 20, 20)
    found = run(model, 0, 20)
    np.testing.assert_array_equal(found.hidden[0], table[rows.tokens])
    x = found.hidden[MODEL.layers].astype(np.float64)
    x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * model.lent.final_norm
    np.testing.assert_allclose(x @ table.T, found.logits, rtol=1e-5, atol=1e-5)


def test_a_layer_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="layer 4"):
        target(tmp_path).listen([4])


def attention_program(width: int) -> tuple[Program, int]:
    """Features [query, key, value] of one head in, what attention makes of them out; part 1 only files."""
    program = Program(
        threads=2,
        isa="auto",
        max_rows=64,
        page_size=32,
        pages=8,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=width,
    )
    q, k, v, out = (program.buffer(width) for _ in range(4))
    for buffer, column in ((q, 0), (k, width), (v, 2 * width)):
        program.feed(buffer, column)
    angles = program.angles([0.0] * (width // 2))
    program.rope(0, q, k, v, angles, False, 1.0)
    program.attention(0, q, out)
    tap = program.tap(out)
    program.listen([tap])
    part = program.part()
    for buffer, column in ((k, width), (v, 2 * width)):
        program.feed(buffer, column)
    program.rope(0, -1, k, v, program.angles([0.0] * (width // 2)), False, 1.0)
    return program, part


def pass_of(program: Program, features: Floats, start: int, reach: Ids | None, part: int) -> Floats:
    count = len(features)
    places: Ids = np.arange(start, start + count, dtype=np.int32)
    none, hidden = np.full(count, -1, np.int32), np.empty((count, program.hidden_width), np.float32)
    zeros: Ids = np.zeros(count, np.int32)
    table: Ids = np.arange(8, dtype=np.int32)[None]
    program.run(
        zeros, places, places.copy(), none, zeros, table, zeros[:0], zeros.copy(),
        None, hidden, features, reach, part,
    )  # fmt: skip
    return hidden


@pytest.mark.parametrize("before", [0, 5, 31, 250])
def test_rows_of_a_block_may_see_each_other(before: int) -> None:
    width, block = 32, 6
    rng = np.random.default_rng(before)
    program, filing = attention_program(width)
    features = rng.normal(size=(before + block, 3 * width)).astype(np.float32)
    for start in range(0, before, 64):
        pass_of(program, features[start : min(start + 64, before)], start, None, filing)
    ends = np.full(block, before + block, np.int32)
    found = pass_of(program, features[before:], before, ends, 0)
    q, k, v = (features[:, i * width : (i + 1) * width].astype(np.float64) for i in range(3))
    k, v = (x.astype(np.float16).astype(np.float64) for x in (k, v))
    scores = np.exp(q[before:] @ k.T)
    np.testing.assert_allclose(found, scores / scores.sum(axis=1, keepdims=True) @ v, rtol=2e-4, atol=2e-5)


def test_seeing_up_to_oneself_is_what_rows_do_anyway() -> None:
    program, _ = attention_program(32)
    features = np.random.default_rng(1).normal(size=(40, 96)).astype(np.float32)
    default = pass_of(program, features, 0, None, 0)
    said = pass_of(program, features, 0, np.arange(1, 41, dtype=np.int32), 0)
    np.testing.assert_array_equal(said, default)


@pytest.mark.parametrize("reach", [[1, 1], [2, 1], [1, 300]])
def test_a_reach_that_cannot_be_is_refused(reach: list[int]) -> None:
    program, _ = attention_program(32)
    with pytest.raises(ValueError, match="reach"):
        pass_of(program, np.zeros((2, 96), np.float32), 0, np.asarray(reach, np.int32), 0)


def test_a_program_works_with_the_weights_of_another(tmp_path: Path) -> None:
    """Two normed halves side by side, through a matrix that another program holds."""
    rng = np.random.default_rng(3)
    matrix = rng.normal(size=(48, 128)).astype(np.float32)
    shape = {
        "max_rows": 8,
        "page_size": 32,
        "pages": 1,
        "layers": 1,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 32,
    }
    owner = Program(threads=1, isa="auto", **shape)
    handle = owner.weight(int(TensorType.F32), 48, 128, matrix.view(np.uint8).reshape(-1))
    program = Program(threads=2, isa="auto", **shape)
    adopted = program.adopt(owner, handle)
    del owner
    left, right, out = program.buffer(64), program.buffer(64), program.buffer(48)
    program.feed(left, 0)
    program.feed(right, 64)
    both = program.acts(128)
    gamma = rng.normal(size=64).astype(np.float32)
    program.norm(left, program.vector(gamma), 1e-6, both)
    program.quantize(right, both, 64)
    program.linear(both, [adopted], [-1], [out])
    program.listen([program.tap(out)])
    features = rng.normal(size=(5, 128)).astype(np.float32)
    found = pass_of(program, features, 0, None, 0)
    x, y = features[:, :64].astype(np.float64), features[:, 64:].astype(np.float64)
    x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * gamma
    np.testing.assert_allclose(found, np.concatenate([x, y], axis=1) @ matrix.T, rtol=1e-4, atol=1e-4)
