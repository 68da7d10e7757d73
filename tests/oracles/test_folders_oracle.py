"""Folders against transformers: what is recorded, and folders that transformers wrote itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oracles.folder_references import FOLDERS, TransformersFolder
from oracles.record_folders import EVERY, POSITIONS, RECORDED, TEXT, prompt
from paceline.models.target import NativeTarget
from paceline.text.tokenizer import Tokenizer
from paceline.weights.source import open_model
from support.passes import random_tokens, run_in_chunks, table_of
from support.text_corpus import corpus

pytestmark = pytest.mark.oracle

RECORDS = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("name", FOLDERS)
def test_recorded_values_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    record = RECORDS[name]
    folder = replace(FOLDERS[name], seed=record["seed"])
    reference = TransformersFolder(folder.write(tmp_path))
    text, _ = reference.greedy(prompt(folder)[:16], TEXT)
    assert text == record["text"]
    logits = reference.logits(prompt(folder))[POSITIONS, ::EVERY]
    assert np.abs(logits - np.array(record["logits"])).max() < 1e-5


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_transformers_wrote(name: str, tmp_path: Path) -> None:
    """Its own spelling of the configuration, its own cut into files, 300 tokens."""
    first = FOLDERS[name].write(tmp_path / "first")
    reference = TransformersFolder(first)
    reference.model.save_pretrained(tmp_path / "second", max_shard_size="100KB")
    shutil.copy(first / "tokenizer.json", tmp_path / "second")
    assert len(list((tmp_path / "second").glob("*.safetensors"))) > 1
    target = NativeTarget.load(open_model(tmp_path / "second"), threads=2)
    tokens = random_tokens(300, target.vocab_size)
    got = run_in_chunks(target, tokens, [200, 1, 8], table_of(target))
    assert np.abs(got - reference.logits(tokens)).max() < 1e-3


def test_ids_are_those_of_transformers(tmp_path: Path, smollm2_path: Path) -> None:
    """A real vocabulary, chat template and special tokens, through the files of a folder."""
    from make_folder import make
    from transformers import AutoTokenizer

    from paceline.text.template import ChatTemplate

    make(smollm2_path, tmp_path, "bf16", 1 << 30)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    splitting = AutoTokenizer.from_pretrained(tmp_path)  # what it is once told it keeps
    with open_model(tmp_path) as folder:
        tokenizer = Tokenizer.from_gguf(folder.metadata)
        template = ChatTemplate.from_gguf(folder.metadata)
    for text in corpus():
        assert tokenizer.encode(text) == splitting(text, split_special_tokens=True)["input_ids"], text
        assert tokenizer.encode(text, parse_special=True) == reference(text)["input_ids"], text
    assert template is not None
    messages = [{"role": "user", "content": "Name three colours."}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert template.encode(tokenizer, messages) == expected
    template.close()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (reference.bos_token_id, reference.eos_token_id)
