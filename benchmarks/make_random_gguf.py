"""Write a GGUF file of random Q4_0 weights in any size, to measure what size alone does: speed and memory.

    python benchmarks/make_random_gguf.py TOKENIZER.gguf OUT.gguf      # the shape of an 8B Llama

The tokenizer is another file's. Every matrix holds the same kind of noise, scaled so that activations neither
vanish nor overflow; the text that comes out means nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

BLOCK, BLOCK_BYTES = 32, 18


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tokenizer", type=Path, help="GGUF file whose tokenizer is taken")
    parser.add_argument("out", type=Path)
    for name, default in (
        ("layers", 32), ("width", 4096), ("hidden", 14336), ("heads", 32), ("kv-heads", 8), ("context", 8192)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    writer = gguf.GGUFWriter(asked.out, "llama")
    vocab = copy_tokenizer(gguf.GGUFReader(asked.tokenizer), writer)
    describe(writer, asked, vocab)
    rng = np.random.default_rng(0)
    shapes = list(matrices(asked, vocab))
    for name, rows, cols in shapes:
        writer.add_tensor_info(
            name, (rows, cols // BLOCK * BLOCK_BYTES), np.dtype(np.uint8), rows * cols // BLOCK * BLOCK_BYTES,
            gguf.GGMLQuantizationType.Q4_0,
        )  # fmt: skip
    norms = [f"blk.{i}.{part}_norm.weight" for i in range(asked.layers) for part in ("attn", "ffn")]
    ones = np.ones(asked.width, np.float32)
    for name in (*norms, "output_norm.weight"):
        writer.add_tensor_info(name, ones.shape, ones.dtype, ones.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, rows, cols in shapes:
        writer.write_tensor_data(noise(rng, rows, cols))
    for _ in (*norms, "output_norm.weight"):
        writer.write_tensor_data(ones)
    writer.close()


def copy_tokenizer(source: gguf.GGUFReader, writer: gguf.GGUFWriter) -> int:
    """Copy what starts with `tokenizer.`; return the size of the vocabulary."""
    for name, field in source.fields.items():
        if not name.startswith("tokenizer."):
            continue
        kind = field.types[0]
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), kind)
    return len(source.fields["tokenizer.ggml.tokens"].data)


def describe(writer: gguf.GGUFWriter, asked: argparse.Namespace, vocab: int) -> None:
    writer.add_name("random")
    writer.add_context_length(asked.context)
    writer.add_embedding_length(asked.width)
    writer.add_block_count(asked.layers)
    writer.add_feed_forward_length(asked.hidden)
    writer.add_head_count(asked.heads)
    writer.add_head_count_kv(asked.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(asked.width // asked.heads)
    writer.add_vocab_size(vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)


def matrices(asked: argparse.Namespace, vocab: int) -> Iterator[tuple[str, int, int]]:
    """(name, rows, columns) of every matrix."""
    width, hidden, kv = asked.width, asked.hidden, asked.width // asked.heads * asked.kv_heads
    yield "token_embd.weight", vocab, width
    yield "output.weight", vocab, width
    for i in range(asked.layers):
        for part, rows, cols in (
            ("attn_q", width, width), ("attn_k", kv, width), ("attn_v", kv, width),
            ("attn_output", width, width), ("ffn_gate", hidden, width), ("ffn_up", hidden, width),
            ("ffn_down", width, hidden),
        ):  # fmt: skip
            yield f"blk.{i}.{part}.weight", rows, cols


def noise(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """[rows, bytes] blocks of one half-precision scale and 32 random nibbles."""
    blocks = rng.integers(0, 256, (rows, cols // BLOCK, BLOCK_BYTES), np.uint8)
    scale = np.float16(0.2 / np.sqrt(cols))  # nibbles minus 8 have a deviation of 4.6
    blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


if __name__ == "__main__":
    main()
