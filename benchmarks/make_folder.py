"""Make a Hugging Face folder from a GGUF file: its weights dequantised, its tokenizer written out.

    python benchmarks/make_folder.py qwen.gguf FOLDER [--dtype bf16|f16|f32] [--max-shard-mb 2000]

For measuring folders where no network is: the same model then runs in Paceline, transformers and vLLM. Llama
and Qwen 2 files with byte-level tokenizers can be turned back.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core import Floats
from paceline.text.byte_level import split_patterns
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import dequantize

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
UNUSED = 5
KINDS = {3: True, 4: False}
"""GGUF's token types that are added tokens, and whether they are special."""


def config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """config.json as transformers writes it."""
    meta, architecture = file.metadata, str(file.metadata["general.architecture"])

    def key(name: str, default: Any = None) -> Any:
        return meta.get(f"{architecture}.{name}", default)

    heads = key("attention.head_count")
    head = key("attention.key_length", key("embedding_length") // heads)
    return {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "dtype": {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype],
        "hidden_act": "silu",
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": key("rope.freq_base", 10000.0)},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }


def tokenizer(meta: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json of a byte-level vocabulary."""
    assert meta["tokenizer.ggml.model"] == "gpt2", "only byte-level tokenizers can be written out"
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    bos = meta.get("tokenizer.ggml.bos_token_id") if meta.get("tokenizer.ggml.add_bos_token") else None
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split_patterns(meta["tokenizer.ggml.pre"])
    ]
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    if bos is not None:
        single.insert(0, {"SpecialToken": {"id": tokens[bos], "type_id": 0}})
        special = {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": tokens[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": KINDS[kind],
            }
            for i, kind in enumerate(kinds)
            if kind in KINDS
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, plain]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": special,
        },
        "decoder": plain,
        "model": {
            "type": "BPE",
            # Control tokens too: the library counts on from the last id for those it does not find here.
            "vocab": {text: i for i, text in enumerate(tokens) if kinds[i] != UNUSED},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {name: meta.get(f"tokenizer.ggml.{role}_token_id") for name, role in roles.items()}
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **named}


def values(file: GGUFFile, name: str, heads: Mapping[str, int]) -> Floats:
    """A tensor in float32, Llama's query and key rows turned back from pairs to halves."""
    info = file.tensors[name]
    found = dequantize(info.type, file.data(name), info.shape)
    count = heads.get(name.split(".")[-2])
    if count is None or file.metadata["general.architecture"] != "llama":
        return found
    rows = found.reshape(count, -1, 2, *info.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(rows.reshape(info.shape))


def encoded(array: Floats, dtype: str) -> bytes:
    """The bytes of an array, rounded to the nearest of its type."""
    if dtype != "bf16":
        return array.astype({"f16": np.float16, "f32": np.float32}[dtype]).tobytes()
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def hf_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.{kind}"


def shards(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Cut the tensors into runs of at most `most` bytes."""
    run: list[str] = []
    for name, size in sizes.items():
        if run and sum(sizes[n] for n in run) + size > most:
            yield run
            run = []
        run.append(name)
    yield run


def write_shard(
    path: Path, arrays: Mapping[str, tuple[str, tuple[int, ...], int]], data: Iterator[bytes]
) -> None:
    """Write one file: [name] -> dtype, shape, bytes; `data` in the same order."""
    header, at = {}, 0
    for name, (dtype, shape, size) in arrays.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for part in data:
            file.write(part)


def make(path: Path, folder: Path, dtype: str, max_shard: int) -> None:
    """Write the whole folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with GGUFFile.open(path) as file:
        meta = file.metadata
        described = config(file, dtype)
        heads = {"attn_q": described["num_attention_heads"], "attn_k": described["num_key_value_heads"]}
        item = {"bf16": 2, "f16": 2, "f32": 4}[dtype]
        sizes = {name: int(np.prod(info.shape)) * item for name, info in file.tensors.items()}
        runs = list(shards(sizes, max_shard))
        where = {}
        for number, run in enumerate(runs, 1):
            name = (
                "model.safetensors" if len(runs) == 1 else f"model-{number:05}-of-{len(runs):05}.safetensors"
            )
            where |= {hf_name(tensor): name for tensor in run}
            arrays = {hf_name(t): (dtype.upper(), file.tensors[t].shape, sizes[t]) for t in run}
            write_shard(folder / name, arrays, (encoded(values(file, t, heads), dtype) for t in run))
        ends = {"bos_token_id": described["bos_token_id"], "eos_token_id": described["eos_token_id"]}
        files = {
            "config.json": described,
            "generation_config.json": ends,
            "tokenizer.json": tokenizer(meta),
            "tokenizer_config.json": tokenizer_config(meta),
        }
        if len(runs) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
            files["model.safetensors.index.json"] = index
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        if template := meta.get("tokenizer.chat_template"):
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16")
    parser.add_argument("--max-shard-mb", type=int, default=2000)
    arguments = parser.parse_args()
    make(arguments.model, arguments.folder, arguments.dtype, arguments.max_shard_mb << 20)


if __name__ == "__main__":
    main()
