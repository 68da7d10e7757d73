"""Folders: the tensors of a GGUF file, made of differently named arrays; and every way to be incomplete."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_folder import make

from paceline.errors import ModelFileError, PacelineError, UnsupportedModelError, UsageError
from paceline.weights.folder import Folder
from paceline.weights.gguf import GGUFFile
from paceline.weights.hf_config import FAMILIES
from paceline.weights.quants import TensorType, dequantize
from paceline.weights.source import Source, default_sampling, open_model
from support.folders import TinyFolder, added, encoded, safetensors_bytes, tiny_tokenizer_json
from support.gguf_writer import write_gguf
from support.tiny_models import TinyModel
from support.tiny_tokenizer import metadata as tokenizer_metadata

FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
DTYPE = {TensorType.F32: "f32", TensorType.F16: "f16", TensorType.BF16: "bf16"}


def values(source: Source, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    info = source.tensors[name]
    data = source.data(name)
    assert data.size == info.nbytes
    return dequantize(info.type, data, info.shape)


# From a file to a folder and back


def gguf_and_folder(tmp_path: Path, model: TinyModel, *, shard: int = 1 << 30) -> tuple[Path, Path]:
    """A GGUF file and the folder that `make_folder` makes of it."""
    file = write_gguf(tmp_path / "m.gguf", model.metadata() | tokenizer_metadata(), model.tensors())
    make(file, tmp_path / "folder", DTYPE[model.kind], shard)
    return file, tmp_path / "folder"


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_round_trip_gives_every_tensor_back(
    tmp_path: Path, kind: TensorType, architecture: str, tied: bool
) -> None:
    model = TinyModel(
        architecture=architecture,
        kind=kind,
        vocab=262,
        heads=4,
        kv_heads=2,
        head_dim=16,
        width=64,
        tied=tied,
        biases=architecture == "qwen2",
    )
    path, folder = gguf_and_folder(tmp_path, model, shard=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    with GGUFFile.open(path) as before, Folder.open(folder) as after:
        assert set(before.tensors) == set(after.tensors)
        for name, info in before.tensors.items():
            assert after.tensors[name].shape == info.shape
            if len(info.shape) == 2:
                assert after.tensors[name].type == kind
                assert (before.data(name) == after.data(name)).all(), name
            else:
                wanted = values(before, name)
                exact = wanted if kind is TensorType.F32 else rounded(wanted, kind)
                assert (values(after, name) == exact).all(), name


def rounded(array: np.ndarray[Any, Any], kind: TensorType) -> np.ndarray[Any, Any]:
    dtype, shape, raw = encoded(array, kind.name)
    assert dtype == kind.name
    return dequantize(kind, np.frombuffer(raw, np.uint8), shape)


def test_a_matrix_that_needs_no_change_is_a_view_of_the_file(tmp_path: Path) -> None:
    with Folder.open(TinyFolder(family="llama", dtype="BF16").write(tmp_path)) as folder:
        for name, viewed in (("blk.0.ffn_up.weight", True), ("blk.0.attn_q.weight", False)):
            first, second = folder.data(name), folder.data(name)
            assert np.shares_memory(first, second) == viewed
            assert not first.flags.writeable or not viewed
            folder.release(name)
            assert (first == second).all()


# Each family's own


@pytest.mark.parametrize("family", FAMILIES)
def test_every_array_of_a_family_becomes_a_tensor(tmp_path: Path, family: str) -> None:
    tiny = TinyFolder(family=family)
    arrays = tiny.arrays()
    with Folder.open(tiny.write(tmp_path)) as folder:
        assert sum(values(folder, name).size for name in folder.tensors) == sum(
            a.size for a in arrays.values()
        )
        got = values(folder, "blk.0.ffn_down.weight") if family != "qwen3_moe" else None
        if got is not None:
            assert (got == arrays["model.layers.0.mlp.down_proj.weight"]).all()
        assert (values(folder, "token_embd.weight") == arrays["model.embed_tokens.weight"]).all()


def test_llamas_queries_and_keys_come_in_pairs(tmp_path: Path) -> None:
    tiny = TinyFolder(family="llama")
    arrays = tiny.arrays()
    with Folder.open(tiny.write(tmp_path)) as folder:
        for ours, theirs, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
            halves = arrays[f"model.layers.1.self_attn.{theirs}.weight"].reshape(heads, 32, 64)
            pairs = values(folder, f"blk.1.{ours}.weight").reshape(heads, 32, 64)
            assert (pairs[:, 0::2] == halves[:, :16]).all()
            assert (pairs[:, 1::2] == halves[:, 16:]).all()


def test_only_what_rotates_is_paired(tmp_path: Path) -> None:
    tiny = TinyFolder(family="llama", settings={"partial_rotary_factor": 0.5})
    halves = tiny.arrays()["model.layers.0.self_attn.q_proj.weight"].reshape(4, 32, 64)
    with Folder.open(tiny.write(tmp_path)) as folder:
        pairs = values(folder, "blk.0.attn_q.weight").reshape(4, 32, 64)
    assert (pairs[:, 0:16:2] == halves[:, :8]).all()
    assert (pairs[:, 1:16:2] == halves[:, 8:16]).all()
    assert (pairs[:, 16:] == halves[:, 16:]).all()


def test_gemmas_norms_count_from_one(tmp_path: Path) -> None:
    tiny = TinyFolder(family="gemma3_text", dtype="BF16")
    with Folder.open(tiny.write(tmp_path)) as folder:
        for ours, theirs in (
            ("blk.0.attn_norm", "model.layers.0.input_layernorm"),
            ("blk.0.attn_q_norm", "model.layers.0.self_attn.q_norm"),
            ("blk.0.post_attention_norm", "model.layers.0.post_attention_layernorm"),
            ("blk.0.ffn_norm", "model.layers.0.pre_feedforward_layernorm"),
            ("blk.0.post_ffw_norm", "model.layers.0.post_feedforward_layernorm"),
            ("output_norm", "model.norm"),
        ):
            stored = rounded(tiny.arrays()[f"{theirs}.weight"], TensorType.BF16)
            assert folder.tensors[f"{ours}.weight"].type == TensorType.F32
            assert (values(folder, f"{ours}.weight") == stored + np.float32(1)).all()


def test_experts_are_stacked_in_order(tmp_path: Path) -> None:
    tiny = TinyFolder(family="qwen3_moe", settings={"num_experts": 12})
    arrays = tiny.arrays()
    with Folder.open(tiny.write(tmp_path)) as folder:
        for ours, theirs in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
            got = values(folder, f"blk.1.ffn_{ours}_exps.weight")
            for expert in range(12):
                assert (got[expert] == arrays[f"model.layers.1.mlp.experts.{expert}.{theirs}.weight"]).all()


def test_rope_factors_become_tensors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    tiny = TinyFolder(family="llama", settings={"rope_parameters": scaling})
    with Folder.open(tiny.write(tmp_path)) as folder:
        assert folder.tensors["rope_freqs.weight"].shape == (16,)
        assert values(folder, "rope_freqs.weight")[[0, -1]].tolist() == [1.0, 8.0]
        folder.release("rope_freqs.weight")


def test_a_tied_head_that_is_stored_again_is_the_embedding(tmp_path: Path) -> None:
    tiny = TinyFolder(family="llama")
    tiny.write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.config() | {"tie_word_embeddings": True}))
    with Folder.open(tmp_path) as folder:
        assert "output.weight" not in folder.tensors


# Rounded while loading


@pytest.mark.parametrize(("method", "kind"), [("q8", TensorType.Q8_0), ("q4", TensorType.Q4_0)])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "phi3"])
def test_which_tensors_are_rounded(tmp_path: Path, method: str, kind: TensorType, family: str) -> None:
    tiny = TinyFolder(family=family, dtype="BF16")
    tiny.write(tmp_path)
    with Folder.open(tmp_path) as plain, Folder.open(tmp_path, method) as folder:
        for name, info in folder.tensors.items():
            whole = values(plain, name if name in plain.tensors else "token_embd.weight")
            if name == "output.weight":
                assert info.type == TensorType.Q8_0
            elif len(info.shape) >= 2 and name.startswith("blk.") and "ffn_gate_inp" not in name:
                assert info.type == kind
            else:
                assert info.type == plain.tensors[name].type
                assert (folder.data(name) == plain.data(name)).all()
                continue
            error = np.abs(values(folder, name) - whole).mean() / np.abs(whole).mean()
            assert error < (0.01 if info.type == TensorType.Q8_0 else 0.12), name
        assert folder.identity() != plain.identity()


def test_only_a_folder_is_rounded(tmp_path: Path) -> None:
    path = TinyModel().write(tmp_path / "m.gguf")
    with pytest.raises(UsageError, match="'q4' does not apply"):
        open_model(path, "q4")
    with pytest.raises(UsageError, match=r"quantize is 'q5'\nhint: .*q[48]"):
        open_model(path, "q5")
    assert isinstance(open_model(path), Source)
    assert isinstance(open_model(TinyFolder().write(tmp_path / "folder")), Source)


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    tiny = TinyFolder()
    tiny.write(tmp_path)
    arrays = tiny.arrays()
    for method in ("q8", "q4"):
        for bad in (np.nan, np.inf, -np.inf, 3e38):
            arrays["model.layers.0.mlp.up_proj.weight"][5, 7] = bad
            stored = {name: encoded(array, "F32") for name, array in arrays.items()}
            (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
            with (
                Folder.open(tmp_path, method) as folder,
                pytest.raises(ModelFileError, match=r"blk.0.ffn_up.weight: weights that are infinite"),
            ):
                folder.data("blk.0.ffn_up.weight")


# Names of folders


def test_identity_follows_the_content(tmp_path: Path) -> None:
    def identity(folder: Path) -> str:
        with Folder.open(folder) as opened:
            return opened.identity()

    one = TinyFolder(seed=1).write(tmp_path / "one")
    assert identity(one) == identity(TinyFolder(seed=1).write(tmp_path / "again"))
    assert identity(one) != identity(TinyFolder(seed=2).write(tmp_path / "other"))
    sharded = TinyFolder(seed=1).write(tmp_path / "sharded", shards=3)
    assert identity(one) != identity(sharded)
    assert len(identity(one)) == 32


# Incomplete, damaged, unknown


def refused(folder: Path, kind: type[PacelineError] = ModelFileError) -> str:
    with pytest.raises(kind) as caught:
        Folder.open(folder)
    assert caught.value.hint
    return caught.value.message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return TinyFolder().write(tmp_path / "model", shards=3)


def test_a_missing_file(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert refused(folder) == "1 of 3 files are missing: model-00002-of-00003.safetensors"


def test_an_index_that_lies(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    first = next(iter(where))

    def write(**changes: Any) -> None:
        index.write_text(json.dumps({"weight_map": where | changes}))

    write(**{"model.extra.weight": where[first]})
    assert refused(folder).endswith("has no tensor 'model.extra.weight', by the index it should")
    write(**{first: "model-00003-of-00003.safetensors"})
    assert f"{first!r} is in model-00001-of-00003.safetensors, by the index in" in refused(folder)
    for name in ("../model.safetensors", "/etc/passwd", "a.bin", 7, ""):
        write(**{first: name})
        assert "names" in refused(folder)
    index.write_text("{}")
    assert refused(folder).endswith("has no weight_map")
    index.write_text("{")
    assert "is not JSON" in refused(folder)
    index.unlink()
    assert "has 3 safetensors files and no model.safetensors.index.json" in refused(folder)


def test_a_name_in_two_files(folder: Path) -> None:
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors")
    assert "is in model-00002-of-00003.safetensors, by the index in" in refused(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "has no model.safetensors"),
    ],
)
def test_a_file_that_is_not_there(tmp_path: Path, name: str, message: str) -> None:
    TinyFolder().write(tmp_path)
    (tmp_path / name).unlink()
    assert message in refused(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "does not hold a JSON object"),
        (b"\xff", "is not UTF-8"),
        (b"[" * 100000, "is not JSON: nested too deep"),
    ],
)
def test_small_files_that_are_damaged(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    TinyFolder().write(tmp_path)
    (tmp_path / name).write_bytes(content)
    assert f"{tmp_path / name} " in refused(tmp_path)
    assert message in refused(tmp_path) or b"[[" in content


def test_what_is_no_folder_of_a_model(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"{tmp_path} has no config.json"
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "holds an adapter, not a model" in refused(tmp_path, UnsupportedModelError)
    TinyModel().write(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=r"is a directory\nhint: give a file in it: m.gguf"):
        Folder.open(tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    TinyFolder().write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "has its weights as pickles" in refused(tmp_path, UnsupportedModelError)


def with_arrays(folder: Path, drop: str = "", **more: tuple[str, tuple[int, ...], bytes]) -> Path:
    stored = {name: encoded(array, "F32") for name, array in TinyFolder().arrays().items() if name != drop}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored | more))
    return folder


def test_arrays_that_are_left_over(tmp_path: Path) -> None:
    TinyFolder().write(tmp_path)
    extra = {"model.layers.0.mlp.extra.weight": encoded(np.ones(3), "F32")}
    message = "the folder has tensors that are not known here: 'model.layers.0.mlp.extra.weight'"
    assert refused(with_arrays(tmp_path, **extra), UnsupportedModelError) == message
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": encoded(np.ones(16), "F32"),
        "model.layers.0.attn.masked_bias": ("BOOL", (1,), b"\x01"),
    }
    with Folder.open(with_arrays(tmp_path, **buffers)) as opened, Folder.open(tmp_path) as same:
        assert set(opened.tensors) == set(same.tensors)


def test_a_head_that_is_missing(tmp_path: Path) -> None:
    TinyFolder().write(tmp_path)
    assert refused(with_arrays(tmp_path, "lm_head.weight")) == (
        "the folder has no lm_head.weight, and its head is not tied"
    )


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8"])
def test_a_dtype_that_does_not_run(tmp_path: Path, dtype: str) -> None:
    TinyFolder().write(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    found = refused(with_arrays(tmp_path, **{name: (dtype, (96, 64), bytes(96 * 64))}), UnsupportedModelError)
    assert found == f"tensor '{name}' has dtype {dtype}"


def test_an_array_without_elements(tmp_path: Path) -> None:
    TinyFolder().write(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert "has no elements" in refused(with_arrays(tmp_path, **{name: ("F32", (0, 64), b"")}))


def test_a_missing_expert(tmp_path: Path) -> None:
    tiny = TinyFolder(family="qwen3_moe")
    tiny.write(tmp_path)
    gone = "model.layers.1.mlp.experts.2.up_proj.weight"
    stored = {name: encoded(array, "F32") for name, array in tiny.arrays().items() if name != gone}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    assert refused(tmp_path) == "expert 2 of blk.1.ffn_up_exps.weight is missing"
    stored[gone] = encoded(np.ones((3, 3)), "F32")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    assert "differ in dtype or shape" in refused(tmp_path)


# Tokenizer, template, sampling


def with_files(tmp_path: Path, **files: Any) -> dict[str, Any]:
    """The metadata of a folder with these files, named without their ending."""
    TinyFolder().write(tmp_path)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with Folder.open(tmp_path) as folder:
        return folder.metadata


def test_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer_json(256)
    tokenizer["added_tokens"] = [added(256, "<tool>", special=False), added(999, "<image>")]
    found = with_files(tmp_path, tokenizer=tokenizer)
    assert found["tokenizer.ggml.model"] == "tokenizer.json"
    assert found["tokenizer.ggml.tokens"][65] == "A"
    assert found["tokenizer.ggml.tokens"][256:] == ["<tool>", "[PAD257]"]
    assert found["tokenizer.ggml.token_type"] == [1] * 256 + [4, 5]


def test_roles_by_text_and_by_id(tmp_path: Path) -> None:
    found = with_files(tmp_path)
    assert found["tokenizer.ggml.bos_token_id"] == 256
    assert found["tokenizer.ggml.eos_token_id"] == 257
    found = with_files(tmp_path, tokenizer_config={"bos_token": "</s>", "eos_token": {"content": "<s>"}})
    assert found["tokenizer.ggml.bos_token_id"] == 257
    assert found["tokenizer.ggml.eos_token_id"] == 256
    assert "tokenizer.ggml.padding_token_id" not in found


def test_what_ends_a_generation(tmp_path: Path) -> None:
    key = "tokenizer.huggingface.eos_token_ids"
    assert with_files(tmp_path)[key] == [257]
    assert with_files(tmp_path, generation_config={"eos_token_id": [7, 8, 100000]})[key] == [7, 8, 257]
    with pytest.raises(ModelFileError, match="eos_token_id is end"):
        with_files(tmp_path, generation_config={"eos_token_id": "end"})


def test_what_a_text_is_wrapped_in(tmp_path: Path) -> None:
    def template(*single: Any) -> dict[str, Any]:
        special = {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}
        special["</s>"] = {"id": "</s>", "ids": [257], "tokens": ["</s>"]}
        return {"type": "TemplateProcessing", "single": list(single), "special_tokens": special}

    def flags(processor: Any) -> tuple[bool, bool]:
        found = with_files(tmp_path, tokenizer=tiny_tokenizer_json() | {"post_processor": processor})
        return found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.add_eos_token"]

    bos, text, eos = (
        {"SpecialToken": {"id": "<s>"}},
        {"Sequence": {"id": "A"}},
        {"SpecialToken": {"id": "</s>"}},
    )
    assert flags(None) == (False, False)
    assert flags(template(text)) == (False, False)
    assert flags(template(bos, text)) == (True, False)
    assert flags(template(text, eos)) == (False, True)
    level = {"type": "ByteLevel", "trim_offsets": True}
    assert flags({"type": "Sequence", "processors": [level, template(bos, text, eos)]}) == (True, True)
    with pytest.raises(UnsupportedModelError, match=r"wraps texts in the tokens \[257\] and \[\]"):
        flags(template(eos, text))


def test_templates_in_every_place(tmp_path: Path) -> None:
    def templates(**files: Any) -> tuple[Any, Any]:
        found = with_files(tmp_path, **files)
        return found.get("tokenizer.chat_template"), found.get("tokenizer.chat_template.tool_use")

    assert templates() == (None, None)
    assert templates(chat_template={"chat_template": "own file"}) == ("own file", None)
    assert templates(tokenizer_config={"chat_template": "inside"}) == ("inside", None)
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert templates(tokenizer_config={"chat_template": named}) == ("a", "b")
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert templates() == ("jinja", "b")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert templates() == ("jinja", "tools")


def test_sampling_defaults(tmp_path: Path) -> None:
    chosen = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
    params = default_sampling(with_files(tmp_path, generation_config=chosen))
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 20, 0.8, 0.0)
    assert params.repetition_penalty == 1.1
    assert default_sampling(with_files(tmp_path, generation_config={"do_sample": False})).temperature == 0.0
    assert default_sampling(with_files(tmp_path, generation_config={})).temperature == 1.0
    with pytest.raises(ModelFileError, match=r"generation_config\.json has top_k = many"):
        with_files(tmp_path, generation_config={"top_k": "many"})
    with pytest.raises(ModelFileError, match="sampling defaults: temperature is -1"):
        default_sampling(with_files(tmp_path, generation_config={"temperature": -1}))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, UnsupportedModelError, "of type 'WordPiece'"),
        ({"model": None}, UnsupportedModelError, "of type 'None'"),
        ({"model": {"type": "BPE", "vocab": {}}}, ModelFileError, "has no vocabulary"),
        ({"model": {"type": "BPE", "vocab": {"a": 258}}}, ModelFileError, "the id 258; config.json has 258"),
        ({"model": {"type": "BPE", "vocab": {"a": "1"}}}, ModelFileError, "gives 'a' the id 1"),
        ({"added_tokens": [{"id": 1}]}, ModelFileError, "which is no token"),
        ({"added_tokens": [added(1, "x", single_word=True)]}, UnsupportedModelError, "for whole words only"),
        ({"added_tokens": 7}, ModelFileError, "adds 7, which is no token"),
    ],
)
def test_tokenizers_that_are_refused(
    tmp_path: Path, change: dict[str, Any], kind: type[PacelineError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        with_files(tmp_path, tokenizer=tiny_tokenizer_json() | change)
    assert caught.value.hint


def test_forgetting_keeps_what_a_run_needs(tmp_path: Path) -> None:
    with Folder.open(TinyFolder().write(tmp_path)) as folder:
        folder.forget_arrays()
        assert folder.metadata["llama.block_count"] == 2
        assert "tokenizer.ggml.tokens" not in folder.metadata
        assert "tokenizer.huggingface.json" not in folder.metadata
