"""The promise everything stands on: a row's logits are the same bits, whatever else is in the pass.

The truth of each test is the text decoded token by token, alone, by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from paceline.core import Floats
from paceline.models.target import NativeTarget
from paceline.native import instruction_sets
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import TensorType
from support.passes import Pass, random_tokens, run_in_chunks, table_of
from support.tiny_models import TinyModel

ISAS = instruction_sets()
K = TensorType

GEOMETRIES = {
    "one head": TinyModel(kind=K.Q4_0, heads=2, kv_heads=2, head_dim=16, width=32, hidden=64, vocab=61),
    "groups of 2": TinyModel(kind=K.Q4_1, heads=4, kv_heads=2, head_dim=80, width=96, hidden=160, vocab=100),
    "groups of 3": TinyModel(kind=K.Q8_0, heads=3, kv_heads=1, head_dim=64, width=192, hidden=96, vocab=37),
    "groups of 7": TinyModel(
        kind=K.F16, architecture="qwen2", biases=True, heads=7, kv_heads=1, head_dim=128, width=64, hidden=64
    ),
    "mixed types": TinyModel(
        kind=K.Q4_K,
        kinds={
            "attn_v": K.Q6_K,
            "ffn_down": K.Q5_K,
            "token_embd": K.Q6_K,
            "attn_q": K.F32,
            "ffn_up": K.IQ4_XS,
        },
        heads=4,
        kv_heads=2,
        head_dim=64,
        width=256,
        hidden=512,
        vocab=83,
        tied=False,
    ),
}

GEOMETRIES |= {
    "gemma3": TinyModel(
        kind=K.Q4_0,
        architecture="gemma3",
        heads=4,
        kv_heads=1,
        head_dim=32,
        width=64,
        layers=6,
        scaling={"attention.sliding_window": 45},
    ),
    "gemma2, caps": TinyModel(
        kind=K.Q5_K,
        architecture="gemma2",
        heads=4,
        kv_heads=2,
        head_dim=64,
        width=256,
        hidden=256,
        scaling={
            "attention.sliding_window": 270,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "experts": TinyModel(
        kind=K.Q4_1,
        kinds={"ffn_gate_inp": K.F32},
        architecture="qwen3moe",
        heads=4,
        kv_heads=2,
        head_dim=32,
        width=64,
        hidden=96,
        experts=7,
    ),
    "phi3": TinyModel(
        kind=K.Q8_0,
        architecture="phi3",
        heads=2,
        head_dim=48,
        width=96,
        scaling={"attention.sliding_window": 1},
    ),
}

Load = Callable[..., NativeTarget]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("models")

    @cache
    def path_of(name: str) -> Path:
        return GEOMETRIES[name].write(folder / f"{name.replace(' ', '-')}.gguf")

    def target(name: str, *, isa: str = ISAS[0], threads: int = 1, context: int = 1024) -> NativeTarget:
        file = GGUFFile.open(path_of(name))
        return NativeTarget.load(file, isa=isa, threads=threads, max_model_len=context, pages=80)

    return target


@pytest.fixture(scope="module")
def truth(load: Load) -> Callable[[str, int], tuple[list[int], Floats]]:
    """Tokens of a text and the logits after each, decoded one by one."""

    @cache
    def decoded(name: str, length: int) -> tuple[list[int], Floats]:
        target = load(name)
        tokens = random_tokens(length, target.vocab_size, seed=length)
        return tokens, run_in_chunks(target, tokens, [1], table_of(target))

    return decoded


Truth = Callable[[str, int], tuple[list[int], Floats]]
names = pytest.mark.parametrize("name", GEOMETRIES)


@names
@pytest.mark.parametrize("chunks", [[2], [3], [5, 8], [7, 1], [16, 17], [31, 33], [64], [300]], ids=str)
def test_prefill_in_any_pieces(load: Load, truth: Truth, name: str, chunks: list[int]) -> None:
    tokens, expected = truth(name, 300)
    target = load(name, threads=2)
    assert (run_in_chunks(target, tokens, chunks, table_of(target)) == expected).all()


@names
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_instruction_sets_and_threads(load: Load, truth: Truth, name: str, isa: str, threads: int) -> None:
    tokens, expected = truth(name, 100)
    target = load(name, isa=isa, threads=threads)
    assert target.isa == isa
    assert (run_in_chunks(target, tokens, [90, 1, 5, 4], table_of(target)) == expected).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_contexts_cross_segments(load: Load, truth: Truth, isa: str, threads: int) -> None:
    """Few rows far into a text: segments of 256 positions are then split among threads."""
    name = "one head" if isa == "portable" else "groups of 3"
    _compare_long(load, truth, name, isa, threads)


@pytest.mark.parametrize("name", ["gemma3", "gemma2, caps"])
@pytest.mark.parametrize("threads", [2, 3])
def test_windows_cross_segments(load: Load, truth: Truth, name: str, threads: int) -> None:
    _compare_long(load, truth, name, ISAS[0], threads)


def _compare_long(load: Load, truth: Truth, name: str, isa: str, threads: int) -> None:
    tokens, expected = truth(name, 800)
    target = load(name, isa=isa, threads=threads)
    got = run_in_chunks(target, tokens, [250, 5, 1, 1, 1, 8, 244, 1, 1, 2, 3, 8], table_of(target))
    assert (got == expected).all()


@names
def test_a_full_prefill_pass(load: Load, truth: Truth, name: str) -> None:
    tokens, expected = truth(name, 800)
    target = load(name, threads=2)
    assert target.max_rows == 512
    assert (run_in_chunks(target, tokens, [512], table_of(target)) == expected).all()
    assert (run_in_chunks(target, tokens, [257, 512], table_of(target)) == expected).all()


@names
@pytest.mark.parametrize("seed", range(4))
def test_ragged_neighbours(load: Load, truth: Truth, name: str, seed: int) -> None:
    """Several texts of different length in one pass, each with a few rows, pages shuffled."""
    rng = np.random.default_rng(seed)
    tokens, expected = truth(name, 300)
    target = load(name, threads=int(rng.integers(1, 4)))
    starts = [int(s) for s in rng.choice([0, 1, 15, 16, 17, 31, 32, 63, 100, 254, 255, 256, 257, 280], 6)]
    pages = rng.permutation(target.pages).tolist()
    tables = [pages[i * 10 : i * 10 + 10] for i in range(len(starts))]
    for start, table in zip(starts, tables, strict=True):
        if start:
            run_in_chunks(target, tokens[:start], [512], table)
    one = Pass(target, tables)
    origin: list[int] = []
    for i, start in enumerate(starts):
        count = int(rng.integers(1, 9))
        one.chain(tokens[start : start + count], start, sequence=i)
        origin += range(start, start + count)
    wanted = sorted(rng.choice(len(one), int(rng.integers(1, len(one) + 1)), replace=False).tolist())
    output = one.run(wanted)
    assert output.logits is not None
    assert (output.logits == expected[[origin[w] for w in wanted]]).all()
    assert (output.argmax == output.logits.argmax(axis=1)).all()
    assert (one.run(wanted, logits=False).argmax == output.argmax).all()


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_several_texts_may_alternate(load: Load, truth: Truth, seed: int) -> None:
    name = "groups of 2"
    rng = np.random.default_rng(seed)
    tokens, expected = truth(name, 100)
    target = load(name, threads=2)
    tables = [table_of(target, first=4 * i, count=4) for i in range(3)]
    one = Pass(target, tables)
    at = [0, 0, 0]
    origin = []
    for sequence in rng.integers(0, 3, 90).tolist():
        one.node(tokens[at[sequence]], at[sequence], sequence=sequence)
        origin.append(at[sequence])
        at[sequence] += 1
    assert (one.logits() == expected[origin]).all()


def add_tree(
    one: Pass, tokens: Sequence[int], start: int, rng: np.random.Generator, vocab: int, nodes: int
) -> list[list[int]]:
    """Row 0 is tokens[start]; then a random tree hangs from it, children in creation order.

    Each node's slot is its position where nobody has it yet, else the next free one, as the engine does it;
    returns for each row the text that leads to it.
    """
    root = one.node(tokens[start], start)
    paths = [list(tokens[: start + 1])]
    positions, rows = [start], [root]
    free = start + 1
    for _ in range(nodes):
        parent = int(rng.integers(0, len(rows)))
        token = int(rng.integers(0, vocab))
        rows.append(one.node(token, positions[parent] + 1, slot=free, parent=rows[parent]))
        positions.append(positions[parent] + 1)
        paths.append([*paths[parent], token])
        free += 1
    return paths


@names
@pytest.mark.parametrize("start", [1, 14, 31, 250, 255, 300, 520])
def test_trees_equal_their_paths_decoded_plainly(load: Load, name: str, start: int) -> None:
    """Every node of a random tree, against its own path decoded token by token."""
    target, plain = load(name, threads=2), load(name, threads=1)
    rng = np.random.default_rng(start)
    tokens = random_tokens(start + 1, target.vocab_size, seed=3)
    run_in_chunks(target, tokens[:start], [512], table_of(target))
    tree = Pass(target, [table_of(target)])
    paths = add_tree(tree, tokens, start, rng, target.vocab_size, nodes=15)
    got = tree.logits()
    run_in_chunks(plain, tokens[:start], [512], table_of(plain))
    for row, path in enumerate(paths):
        expected = run_in_chunks(plain, path[start:], [1], table_of(plain), start=start)[-1]
        assert (got[row] == expected).all(), f"node {row} at depth {len(path) - start - 1}"


def test_trees_of_several_texts_share_a_pass(load: Load) -> None:
    name = "groups of 3"
    target, plain = load(name, threads=2), load(name)
    tables = [table_of(target, first=10 * i, count=10) for i in range(3)]
    texts = [random_tokens(n, target.vocab_size, seed=n) for n in (40, 259, 7)]
    for text, table in zip(texts, tables, strict=True):
        run_in_chunks(target, text[:-1], [512], table)
    one = Pass(target, tables)
    expected = []
    for i, text in enumerate(texts):
        last = len(text) - 1
        root = one.node(text[-1], last, sequence=i)
        left = one.node(1, last + 1, slot=last + 1, parent=root, sequence=i)
        right = one.node(2, last + 1, slot=last + 2, parent=root, sequence=i)
        one.node(3, last + 2, slot=last + 3, parent=right, sequence=i)
        one.node(4, last + 2, slot=last + 4, parent=left, sequence=i)
        paths: list[list[int]] = [[], [1], [2], [2, 3], [1, 4]]
        expected += [run_in_chunks(plain, text + path, [512], table_of(plain))[-1] for path in paths]
    assert (one.logits() == np.stack(expected)).all()


@names
def test_an_accepted_path_is_moved_into_place(load: Load, name: str) -> None:
    """After `move`, decoding goes on as if the path had been written plainly."""
    target, plain = load(name, threads=2), load(name)
    start = 254
    tokens = random_tokens(start + 1, target.vocab_size, seed=8)
    table = table_of(target)[::-1]
    run_in_chunks(target, tokens[:start], [512], table)
    tree = Pass(target, [table])
    root = tree.node(tokens[start], start)
    tree.node(5, start + 1, slot=start + 1, parent=root)
    kept = [tree.node(6, start + 1, slot=start + 2, parent=root)]
    tree.node(7, start + 2, slot=start + 3, parent=kept[-1])
    kept.append(tree.node(8, start + 2, slot=start + 4, parent=kept[-1]))
    kept.append(tree.node(9, start + 3, slot=start + 5, parent=kept[-1]))
    tree.run()
    target.move(
        np.asarray(table, np.int32), [start + 2, start + 4, start + 5], [start + 1, start + 2, start + 3]
    )
    text = [*tokens, 6, 8, 9]
    after = run_in_chunks(target, [10, 11], [1], table, start=len(text))
    expected = run_in_chunks(plain, [*text, 10, 11], [1], table_of(plain))[-2:]
    assert (after == expected).all()


@names
def test_a_copied_page_is_the_same_page(load: Load, name: str) -> None:
    target, plain = load(name, threads=2), load(name)
    tokens = random_tokens(70, target.vocab_size, seed=9)
    run_in_chunks(target, tokens, [70], [3, 1, 4])
    for source, copy in ((3, 10), (1, 11), (4, 12)):
        target.copy_page(source, copy)
        if target.window is not None:
            target.window.copy_page(source, copy)
    run_in_chunks(
        target, random_tokens(96, target.vocab_size, seed=1), [96], [3, 1, 4]
    )  # overwrite the originals
    after = run_in_chunks(target, [1, 2, 3], [1], [10, 11, 12], start=70)
    expected = run_in_chunks(plain, [*tokens, 1, 2, 3], [1], table_of(plain))[-3:]
    assert (after == expected).all()


WINDOWED = {name: model for name, model in GEOMETRIES.items() if "attention.sliding_window" in model.scaling}


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("chunk", [1, 7, 32, 200])
def test_pages_behind_a_window_can_be_written_again(load: Load, truth: Truth, name: str, chunk: int) -> None:
    tokens, expected = truth(name, 800)
    target = load(name, threads=2)
    assert target.window is not None
    most = -(-(target.window.size - 1 + chunk) // 32) + 1
    ring = (list(range(5, 5 + most)) * 25)[:25]
    got = run_in_chunks(target, tokens, [chunk], list(range(40, 65)), windows=ring)
    assert (got == expected).all()


@pytest.mark.parametrize("name", WINDOWED)
def test_a_path_of_a_tree_moves_in_both_kinds_of_pages(load: Load, name: str) -> None:
    target, plain = load(name), load(name)
    tokens = random_tokens(61, target.vocab_size, seed=3)
    table, windows = [9, 2, 30, 4], [1, 7, 3, 0]
    run_in_chunks(target, tokens, [61], table, windows=windows)
    tree = Pass(target, [table], [windows])
    root = tree.node(4, 61)
    tree.node(5, 62, parent=root)
    kept = [tree.node(6, 62, slot=63, parent=root)]
    kept.append(tree.node(8, 63, slot=65, parent=kept[0]))
    expected = run_in_chunks(plain, [*tokens, 4, 6, 8, 10], [1], table_of(plain))[-4:]
    assert (tree.logits([root, *kept]) == expected[:3]).all()
    target.move(np.asarray(table, np.int32), [63, 65], [62, 63], np.asarray(windows, np.int32))
    after = run_in_chunks(target, [10], [1], table, start=64, windows=windows)
    assert (after == expected[3:]).all()


def test_what_lay_in_the_cache_before_does_not_matter(load: Load) -> None:
    """Slots beyond a row's own position may hold anything."""
    name = "groups of 2"
    fresh, used = load(name), load(name)
    table = table_of(used)
    run_in_chunks(used, random_tokens(600, used.vocab_size, seed=4), [512], table)
    tokens = random_tokens(300, used.vocab_size, seed=5)
    expected = run_in_chunks(fresh, tokens, [40, 1, 3, 512], table)
    assert (run_in_chunks(used, tokens, [40, 1, 3, 512], table) == expected).all()


def test_passes_repeat(load: Load) -> None:
    """Many passes of changing shape with more threads than cores; every one gives the same bits."""
    name = "one head"
    target = load(name, threads=6)
    tokens = random_tokens(64, target.vocab_size, seed=6)
    expected = run_in_chunks(target, tokens, [64], table_of(target))
    for turn in range(300):
        one = Pass(target, [table_of(target)])
        at = turn % 60
        count = 1 + turn % 4
        one.chain(tokens[at : at + count], at)
        assert (one.logits() == expected[at : at + count]).all()


BROKEN = {
    "token id outside": {"token": 61},
    "position negative": {"position": -1, "slot": 0},
    "above its slot": {"position": 3, "slot": 2, "parent": 0},
    "slot beyond the page table": {"position": 1, "slot": 80 * 32, "parent": 0},
    "parent not before": {"position": 1, "parent": 1},
    "another sequence or position": {"position": 2, "parent": 0},
    "sequence index": {"position": 1, "sequence": 1},
    "its own slot": {"position": 1, "slot": 2},
}


@pytest.mark.parametrize("message", BROKEN)
def test_rows_that_would_corrupt_memory_are_refused(load: Load, message: str) -> None:
    target = load("one head")
    one = Pass(target, [table_of(target)])
    one.node(1, 0)
    one.node(**{"token": 1, "position": 1, **BROKEN[message]})
    with pytest.raises(ValueError, match=message):
        one.run()


def test_moves_and_copies_outside_the_cache_are_refused(load: Load) -> None:
    target = load("one head")
    table = np.arange(2, dtype=np.int32)
    for sources, targets in (([64], [0]), ([1], [64]), ([-1], [0])):
        with pytest.raises(ValueError, match="slot out of range"):
            target.move(table, sources, targets)
    with pytest.raises(ValueError, match="page id out of range"):
        target.move(np.asarray([0, 80], np.int32), [1], [0])
    with pytest.raises(ValueError, match="page out of range"):
        target.copy_page(0, 80)


def test_window_pages_outside_the_cache_are_refused(load: Load) -> None:
    target, plain = load("phi3"), load("one head")
    assert target.window is not None
    for window in (80, -1):
        with pytest.raises(ValueError, match="window page id out of range"):
            run_in_chunks(target, [1, 2], [2], [0, 1], windows=[window, 0])
        with pytest.raises(ValueError, match="window page id out of range"):
            target.move(np.asarray([0, 1], np.int32), [1], [0], np.asarray([0, window], np.int32))
        with pytest.raises(ValueError, match="page out of range"):
            target.window.copy_page(window, 0)
    with pytest.raises(ValueError, match="another shape"):
        run_in_chunks(target, [1, 2], [2], [0, 1], windows=[0])
    with pytest.raises(ValueError, match="window page id out of range"):
        run_in_chunks(plain, [1, 2], [2], [0, 1], windows=[0, 0])
