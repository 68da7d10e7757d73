"""What `show` says of the demo model, whose numbers are public."""

from __future__ import annotations

from pathlib import Path

from paceline.tools.describe import describe
from support.tiny_models import TinyModel


def test_the_demo_model(smollm2_path: Path) -> None:
    found = describe(smollm2_path)
    assert (found.architecture, found.layers, found.width) == ("llama", 30, 576)
    assert (found.heads, found.kv_heads, found.context_length) == (9, 3, 8192)
    assert found.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert found.parameters == 134_515_008
    assert found.bytes == 98_362_432
    assert set(found.tensor_bytes) == {"Q4_1", "Q8_0", "F32"}
    assert sum(found.tensor_bytes.values()) < found.bytes
    assert (found.tokenizer, found.pre_tokenizer, found.vocabulary) == ("gpt2", "smollm", 49152)
    assert found.license == "apache-2.0"
    assert found.chat_template is not None
    assert found.chat_template.startswith("{%")


def test_windows_are_told_apart(tmp_path: Path) -> None:
    pattern = {"attention.sliding_window": 20, "attention.sliding_window_pattern": 3}
    found = describe(TinyModel(layers=3, scaling=pattern).write(tmp_path / "m.gguf"))
    assert (found.kv_bytes_per_token, found.window, found.window_bytes_per_token) == (192, 20, 128)
