"""Loading: what is refused, in which words, and what a loaded model takes and bears."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import (
    ModelFileError,
    PacelineError,
    ResourceError,
    UnsupportedModelError,
    UsageError,
)
from paceline.models import target as target_module
from paceline.models.target import NativeTarget, cgroup_room, physical_cores
from paceline.native import instruction_sets, packed_bytes
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import TensorType
from support.gguf_writer import Tensor, write_gguf
from support.passes import Pass, random_tokens, run_in_chunks, table_of
from support.tiny_models import TinyModel

TINY = TinyModel(context=512)


def load(path: Path, **options: Any) -> NativeTarget:
    return NativeTarget.load(GGUFFile.open(path), **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.write(tmp_path_factory.mktemp("model") / "tiny.gguf")


def changed(
    path: Path, *, tensors: Mapping[str, Tensor | None] | None = None, keys: dict[str, Any] | None = None
) -> Path:
    """The tiny model with tensors or metadata replaced; None removes."""
    merged_tensors = {**TINY.tensors(), **(tensors or {})}
    merged_keys = {**TINY.metadata(), **(keys or {})}
    return write_gguf(
        path,
        {key: value for key, value in merged_keys.items() if value is not None},
        {name: tensor for name, tensor in merged_tensors.items() if tensor is not None},
    )


def refusal(kind: type[PacelineError], path: Path, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load(path, **options)
    assert type(caught.value) is kind
    assert caught.value.hint
    return caught.value.message


def test_what_a_target_says_of_itself(tiny: Path) -> None:
    target = load(tiny, threads=3, max_model_len=100)
    assert (target.vocab_size, target.context_limit, target.threads) == (61, 100, 3)
    assert (target.page_size, target.max_rows) == (32, 512)
    assert target.pages * target.page_size >= 125
    assert target.isa == instruction_sets()[0]
    assert target.cache.held(7) == 7 * 2 * 2 * 16 * 2
    matrices = [tensor for tensor in TINY.tensors().values() if len(tensor.shape) == 2]
    assert target.weight_bytes == sum(packed_bytes(0, *tensor.shape) for tensor in matrices)
    assert load(tiny).context_limit == 512
    assert load(tiny).threads == physical_cores()
    assert load(tiny, pages=7).pages == 7


def test_the_time_of_a_pass_by_operation(tiny: Path) -> None:
    target = load(tiny)
    one = Pass(target, [table_of(target)])
    one.chain([1, 2, 3], 0)
    before = one.run()
    start = time.perf_counter()
    times = target.op_times(one.rows())
    matrices, rows = {"linear", "linear+", "swiglu", "head"}, {"embed", "copy", "norm", "quantize"}
    assert set(times) == {*matrices, *rows, "rope", "attention"}
    assert 0.0 < sum(times.values()) <= time.perf_counter() - start
    assert min(times.values()) >= 0.0
    np.testing.assert_array_equal(one.run().argmax, before.argmax)


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        (TensorType.Q4_0, (32, 64), 32 * 64 * 18 // 32),
        (TensorType.Q8_0, (32, 64), 32 * 64 * 34 // 32),
        (TensorType.Q4_K, (32, 256), 32 * 256 * 148 // 256),  # six-bit scales widened to bytes
        (TensorType.F16, (17, 64), 32 * 64 * 2),  # rows in blocks of 16
    ],
)
def test_packed_bytes(kind: TensorType, shape: tuple[int, int], expected: int) -> None:
    assert packed_bytes(int(kind), *shape) == expected


class TestRefusals:
    def test_options_that_mean_nothing(self, tiny: Path) -> None:
        assert "max_model_len is 513" in refusal(UsageError, tiny, max_model_len=513)
        assert "max_model_len is 1" in refusal(UsageError, tiny, max_model_len=1)
        assert "threads is 0" in refusal(UsageError, tiny, threads=0)
        assert "threads is 257" in refusal(UsageError, tiny, threads=257)
        assert "pages is 0" in refusal(UsageError, tiny, pages=0)

    def test_kernel_sets(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UsageError) as caught:
            load(tiny, isa="avx51")
        assert "'avx51'" in caught.value.message
        assert "'avx512'" in caught.value.hint
        monkeypatch.setenv("PACELINE_ISA", "portable")
        assert load(tiny).isa == "portable"
        monkeypatch.setenv("PACELINE_ISA", "sse")
        assert "'sse'" in refusal(UsageError, tiny)
        monkeypatch.delenv("PACELINE_ISA")
        monkeypatch.setattr(target_module, "instruction_sets", lambda: ["portable"])
        with pytest.raises(ResourceError) as refused:
            load(tiny, isa="avx2")
        assert "avx2" in refused.value.message
        assert "portable" in refused.value.hint

    def test_no_architecture(self, tmp_path: Path) -> None:
        path = changed(tmp_path / "m.gguf", keys={"general.architecture": None})
        assert "architecture" in refusal(ModelFileError, path)

    def test_an_architecture_that_is_not_here(self, tmp_path: Path) -> None:
        path = changed(tmp_path / "m.gguf", keys={"general.architecture": "mamba"})
        assert "'mamba'" in refusal(UnsupportedModelError, path)

    @pytest.mark.parametrize(
        "name",
        ["blk.1.ffn_down.weight", "blk.0.attn_q.weight", "output_norm.weight", "blk.1.attn_norm.weight"],
    )
    def test_a_missing_tensor(self, tmp_path: Path, name: str) -> None:
        assert name in refusal(ModelFileError, changed(tmp_path / "m.gguf", tensors={name: None}))

    def test_no_embedding(self, tmp_path: Path) -> None:
        path = changed(tmp_path / "m.gguf", tensors={"token_embd.weight": None})
        assert "embedding" in refusal(ModelFileError, path)
        path = changed(tmp_path / "n.gguf", tensors={"token_embd.weight": Tensor.of(np.ones(32))})
        assert "embedding" in refusal(ModelFileError, path)

    def test_leftover_tensors(self, tmp_path: Path) -> None:
        extra: Mapping[str, Tensor | None] = {
            f"blk.{i}.attn_q_norm.weight": Tensor.of(np.ones(16)) for i in range(5)
        }
        message = refusal(UnsupportedModelError, changed(tmp_path / "m.gguf", tensors=extra))
        assert "blk.0.attn_q_norm.weight" in message
        assert "and 2 more" in message

    def test_layers_beyond_the_count(self, tmp_path: Path) -> None:
        path = changed(tmp_path / "m.gguf", keys={"llama.block_count": 1})
        assert "blk.1." in refusal(UnsupportedModelError, path)

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("blk.0.attn_k.weight", (32, 32)),
            ("blk.0.ffn_up.weight", (32, 64)),
            ("blk.0.attn_norm.weight", (16,)),
            ("blk.0.attn_norm.weight", (1, 32)),
            ("token_embd.weight", (61, 64)),
        ],
        ids=str,
    )
    def test_wrong_shapes(self, tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
        path = changed(tmp_path / "m.gguf", tensors={name: Tensor.of(np.ones(shape))})
        message = refusal(ModelFileError, path)
        assert name in message
        assert str(shape) in message

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.1.ffn_up.weight"])
    def test_weights_that_are_no_numbers(self, tmp_path: Path, name: str, value: float) -> None:
        values = np.ones(TINY.tensors()[name].shape)
        values.reshape(-1)[-1] = value
        path = changed(tmp_path / "m.gguf", tensors={name: Tensor.of(values)})
        assert f"{name}: weights that are infinite or not a number" in refusal(ModelFileError, path)

    def test_rope_factors(self, tmp_path: Path) -> None:
        factors = {"rope_freqs.weight": Tensor.of(np.zeros(8))}
        assert "rope_freqs" in refusal(ModelFileError, changed(tmp_path / "m.gguf", tensors=factors))
        factors = {"rope_freqs.weight": Tensor.of(np.ones(4))}
        assert "expected (8,)" in refusal(ModelFileError, changed(tmp_path / "n.gguf", tensors=factors))

    def test_sizes_beyond_any_machine(self, tmp_path: Path) -> None:
        """A hostile header costs an error, not memory."""
        keys = {"llama.feed_forward_length": 2**31 - 32}
        message = refusal(ModelFileError, changed(tmp_path / "m.gguf", keys=keys))
        assert "ffn_gate.weight is (64, 32), expected (2147483616, 32)" in message


class TestMemory:
    def test_a_model_larger_than_memory(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(target_module, "free_memory", lambda: 100 * 1024)
        message = refusal(ResourceError, tiny)
        assert "the model needs 1 MiB" in message
        assert "0 MiB are free" in message

    def test_the_context_shrinks_to_what_fits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = replace(TINY, context=1_000_000).write(tmp_path / "long.gguf")
        file = GGUFFile.open(path)
        needs = NativeTarget.outline(file).needs
        program = (needs.weights + needs.workspace) * 1.15
        monkeypatch.setattr(target_module, "free_memory", lambda: int(program) + 5000 * 5 // 4 * 128 + 64)
        assert load(path).context_limit == 5000
        assert load(path, max_model_len=4000).context_limit == 4000
        message = refusal(ResourceError, path, max_model_len=5001)
        assert "5001 tokens of cache 1 MiB more" in message

    def test_windows_bound_what_a_long_text_takes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = replace(TINY, context=1_000_000, scaling={"attention.sliding_window": 64}).write(
            tmp_path / "long.gguf"
        )
        file = GGUFFile.open(path)
        needs = NativeTarget.outline(file).needs
        assert (needs.cache.per_token, needs.cache.window_per_token) == (0, 128)
        program = int((needs.weights + needs.workspace) * 1.15)
        monkeypatch.setattr(target_module, "free_memory", lambda: program + 100_000)
        target = load(path)
        assert target.context_limit == 1_000_000
        assert target.pages * target.page_size >= 1_250_000
        assert window_pages(path) == -(-(64 + 32 + 512) * 5 // (4 * 32)) + 2  # one text and a quarter more
        assert window_pages(path, max_model_len=300) == 14  # no more than others
        assert window_pages(path, pages=77) == 77
        monkeypatch.setattr(target_module, "free_memory", lambda: program + 200 * 32 * 128 + 50)
        assert window_pages(path) == 200
        message = refusal_of_memory(monkeypatch, path, program + 1000)
        assert "64 tokens of cache" in message

    def test_the_cache_of_windows_stays_as_planned(self, tmp_path: Path) -> None:
        """A text of 5000 tokens through windows of 256, by what is resident."""
        model = TinyModel(
            heads=8,
            kv_heads=8,
            head_dim=128,
            width=64,
            layers=6,
            context=8192,
            scaling={"attention.sliding_window": 256, "attention.sliding_window_pattern": 3},
        )
        grown, planned, unbounded = map(
            int, run_python(GROWTH, str(model.write(tmp_path / "m.gguf"))).split()
        )
        assert abs(grown - planned) < 5 << 20  # system pages are large
        assert unbounded - planned > 60 << 20

    def test_types_that_grow_are_counted_as_they_will_be(self, tmp_path: Path) -> None:
        model = TinyModel(kind=TensorType.IQ4_XS, width=256, hidden=512, heads=4, head_dim=64, vocab=512)
        file = GGUFFile.open(model.write(tmp_path / "m.gguf"))
        in_file = sum(info.nbytes for info in file.tensors.values())
        target = NativeTarget.load(file)
        assert target.weight_bytes > 1.9 * in_file
        assert NativeTarget.outline(file).needs.weights >= target.weight_bytes

    def test_control_groups(self, tmp_path: Path) -> None:
        (tmp_path / "memory.max").write_text("1000000\n")
        (tmp_path / "memory.current").write_text("900000\n")
        (tmp_path / "memory.stat").write_text("anon 200000\ninactive_file 300000\nactive_file 350000\n")
        assert cgroup_room(tmp_path) == 750_000
        (tmp_path / "memory.max").write_text("max\n")
        assert cgroup_room(tmp_path) is None
        assert cgroup_room(tmp_path / "missing") is None

    def test_a_loaded_model_takes_its_file_and_little_more(self, smollm2_path: Path) -> None:
        """Resident after a prompt of 300 tokens: file, cache used, and 15 %."""
        used, fixed = self._resident(smollm2_path)
        file = smollm2_path.stat().st_size
        cache = 320 * 30 * 2 * 3 * 64 * 2
        assert used - fixed <= (file + cache) * 1.15

    @staticmethod
    def _resident(path: Path) -> tuple[int, int]:
        """Bytes resident with the model loaded and used, and with everything imported and the header read."""
        script = """
            import sys
            import numpy as np
            from paceline.core import Rows
            from paceline.models.target import NativeTarget
            from paceline.weights.gguf import GGUFFile

            def resident():
                lines = open("/proc/self/status").read().splitlines()
                return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

            file = GGUFFile.open(sys.argv[1])
            fixed = resident()
            target = NativeTarget.load(file)
            at = np.arange(300, dtype=np.int32)
            zeros = np.zeros(300, np.int32)
            table = np.arange(10, dtype=np.int32)[None]
            target.forward(Rows(at + 1000, at, at, zeros - 1, zeros, table, at[-1:], False))
            print(resident(), fixed)
        """
        used, fixed = run_python(script, str(path)).split()
        return int(used), int(fixed)


GROWTH = """
    import sys
    import numpy as np
    from paceline.core import Rows
    from paceline.models.kv import KVCache, tables
    from paceline.models.target import NativeTarget
    from paceline.weights.gguf import GGUFFile

    def resident():
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    target = NativeTarget.load(GGUFFile.open(sys.argv[1]), threads=2)
    cache = KVCache.of(target)
    sequence = cache.open([0])

    def run(count):
        assert cache.reserve(sequence, count)
        at = np.arange(len(sequence), len(sequence) + count, dtype=np.int32)
        zeros = np.zeros(count, np.int32)
        pages, window_pages = tables([sequence])
        target.forward(Rows(zeros, at, at, zeros - 1, zeros, pages, zeros[:1], False, window_pages))
        cache.commit(sequence, [0] * count)

    run(512)
    before = resident() - target.cache.held(512)
    for _ in range(8):
        run(512)
    for _ in range(400):
        run(1)
    needs, tokens = target.cache, len(sequence)
    print(resident() - before, needs.held(tokens), tokens * (needs.per_token + needs.window_per_token))
"""


def window_pages(path: Path, **options: Any) -> int:
    window = load(path, **options).window
    assert window is not None
    return window.pages


def refusal_of_memory(monkeypatch: pytest.MonkeyPatch, path: Path, free: int) -> str:
    monkeypatch.setattr(target_module, "free_memory", lambda: free)
    return refusal(ResourceError, path)


def run_python(script: str, *arguments: str) -> str:
    """Run a script in a process of its own and return what it printed."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_logits_that_are_no_numbers_are_an_error(tmp_path: Path) -> None:
    """Finite weights can still overflow; greedy decoding must not go on with token 0."""
    huge: Mapping[str, Tensor | None] = {
        "blk.0.ffn_down.weight": Tensor.of(np.full((32, 64), 3e38)),
        "blk.0.ffn_up.weight": Tensor.of(np.full((64, 32), 3e38)),
        "blk.1.ffn_down.weight": Tensor.of(np.full((32, 64), -3e38)),
    }
    target = load(changed(tmp_path / "m.gguf", tensors=huge))
    one = Pass(target, [table_of(target)])
    one.chain([1, 2, 3], 0)
    with pytest.raises(ModelFileError, match="overflow"):
        one.run(logits=False)


def test_threads_that_cannot_be_started(tiny: Path) -> None:
    script = """
        import resource, sys
        from paceline.errors import ResourceError
        from paceline.models.target import NativeTarget
        from paceline.weights.gguf import GGUFFile

        file = GGUFFile.open(sys.argv[1])
        status = open("/proc/self/status").read().splitlines()
        size = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
        resource.setrlimit(resource.RLIMIT_AS, (size + (400 << 20),) * 2)
        try:
            NativeTarget.load(file, threads=200, max_model_len=64)
        except ResourceError as error:
            print(error.message)
        print(NativeTarget.load(file, threads=2, max_model_len=64).threads)
    """
    message, threads = run_python(script, str(tiny)).splitlines()
    assert message.startswith("200 threads cannot be started")
    assert threads == "2"


def test_a_forked_child_computes_by_itself_and_ends(tiny: Path) -> None:
    script = """
        import os, sys
        import numpy as np
        from paceline.core import Rows
        from paceline.models.target import NativeTarget
        from paceline.weights.gguf import GGUFFile

        target = NativeTarget.load(GGUFFile.open(sys.argv[1]), threads=3)
        at = np.arange(9, dtype=np.int32)
        zeros = np.zeros(9, np.int32)
        rows = Rows(at, at, at, zeros - 1, zeros, zeros[None, :1], at, True)
        before = target.forward(rows).logits.copy()
        child = os.fork()
        if child == 0:
            same = (target.forward(rows).logits == before).all()
            del target  # members of the parent cannot be joined here
            os._exit(0 if same else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, (target.forward(rows).logits == before).all())
    """
    assert run_python(script, str(tiny)).split() == ["0", "True"]


def test_targets_come_and_go(tiny: Path) -> None:
    """Loading, running and dropping many, with more threads than cores."""
    tokens = random_tokens(20, TINY.vocab)
    expected = run_in_chunks(load(tiny, threads=1), tokens, [20], [0])
    for threads in range(1, 40):
        target = load(tiny, threads=threads % 7 + 1, max_model_len=64)
        assert (run_in_chunks(target, tokens, [20], [0]) == expected).all()


def test_the_embedding_outlives_the_file_object(tiny: Path) -> None:
    """Rows are read from the map as they are asked for; closing the file must not pull it away."""
    file = GGUFFile.open(tiny)
    target = NativeTarget.load(file)
    expected = run_in_chunks(target, [1, 2, 3], [3], [0])
    file.close()
    del file
    assert (run_in_chunks(target, [1, 2, 3], [3], [0]) == expected).all()
