"""vLLM's words for speculation mean what they mean there, or are refused with what to write instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.options import EngineFlags
from paceline.drafters.registry import canonical, configure, create
from paceline.drafters.speculative_config import translate
from paceline.errors import UsageError
from support.block_heads import TinyHead as TinyBlock
from support.folders import TinyFolder
from support.head_targets import host_for, target_for
from support.tiny_heads import TinyHead
from support.tiny_mtp import TinyMtp
from support.tiny_pair import write_model
from support.tiny_peagle import TinyPeagle
from support.tiny_tokenizer import VOCAB_SIZE

EAGLE3 = TinyHead(vocab=VOCAB_SIZE)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"method": "ngram", "prompt_lookup_max": 5}, ("ngram", {"prompt_lookup_max": 5})),
        ({"method": "eagle3", "model": "m", "parallel_drafting": True}, ("peagle", {"model": "m"})),
        ({"method": "eagle3", "model": "m", "parallel_drafting": False}, ("eagle3", {"model": "m"})),
        ({"method": "dflash", "model": "m", "parallel_drafting": True}, ("dflash", {"model": "m"})),
        ({"model": "m", "num_speculative_tokens": 5}, ("any", {"model": "m", "num_speculative_tokens": 5})),
        ({"model": "[ngram]", "prompt_lookup_max": 4}, ("ngram", {"prompt_lookup_max": 4})),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 0}, ("suffix", {"max_tokens": 0})),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 9}, ("suffix", {})),
        ({"method": "standalone", "max_model_len": 99}, ("standalone", {"max_model_len": 99})),
        ({"method": "eagle", "model": "m", "max_model_len": 99}, ("eagle", {"model": "m"})),
        ({"method": "draft", "model": "m", "use_heterogeneous_vocab": True}, ("draft", {"model": "m"})),
        ({"method": "eagle3", "model": "o/n", "revision": "abc"}, ("eagle3", {"model": "o/n@abc"})),
        ({"method": "draft", "model": "o/n:Q4", "revision": "v"}, ("draft", {"model": "o/n@v:Q4"})),
        ({"method": "mtp", "model": None, "quantization": None}, ("mtp", {})),
        ({"method": "mtp", "rejection_sample_method": "standard"}, ("mtp", {})),
    ],
)  # fmt: skip
def test_words_are_translated(config: dict[str, Any], expected: tuple[str, dict[str, Any]]) -> None:
    assert translate(config) == expected
    name, options = expected
    assert translate({"method": name, **options}) == expected, "once is enough"


def test_what_has_no_meaning_is_left_out_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = {"method": "suffix", "draft_tensor_parallel_size": 1, "suffix_decoding_max_tree_depth": 24}
    assert translate(config) == ("suffix", {})
    assert [record.message for record in caplog.records] == [
        "draft_tensor_parallel_size has no meaning here and is left out",
        "suffix_decoding_max_tree_depth has no meaning here and is left out",
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"method of a drafter is None\nhint: write \{\"method\": \"ngram\"\}, or name a model"),
        ({"num_speculative_tokens": 3}, "method of a drafter is None"),
        ({"method": 3}, "method of a drafter is 3"),
        ({"method": "medusa", "model": "m"}, "Medusa heads do not run here\nhint: what runs: suffix"),
        ({"method": "mlp_speculator", "model": "m"}, "MLP speculators do not run here"),
        ({"method": "eagle4"}, "no drafter 'eagle4'\nhint: did you mean 'eagle"),
        ({"method": "eagle3", "modle": "m"}, "eagle3 has no option 'modle'\nhint: did you mean 'model'"),
        (
            {"method": "ngram", "num_speculative_token": 3},
            "no option 'num_speculative_token'\nhint: did you mean 'num_speculative_tokens'",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"method": "ngram", "num_speculative_tokens": "many"}, "num_speculative_tokens is 'many'"),
        ({"method": "eagle3"}, "drafter 'eagle3' needs a model"),
        (
            {"method": "eagle3", "model": "m", "quantization": "fp8"},
            "quantization is 'fp8'.*\nhint: give dtype",
        ),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "is 'synthetic', which does not apply"),
        ({"method": "ngram", "speculative_token_tree": "[(0,)]"}, "hint: leave it out: trees grow"),
        (
            {"method": "draft_model", "model": "m", "parallel_drafting": True},
            "does not go with 'draft_model'",
        ),
        ({"method": "eagle3", "model": "m", "parallel_drafting": "yes"}, "parallel_drafting is 'yes'"),
        (
            {"method": "draft_model", "model": "m", "use_heterogeneous_vocab": 1},
            "use_heterogeneous_vocab is 1",
        ),
        ({"method": "eagle3", "model": "/a/b/c", "revision": "v1"}, "revision is 'v1', of '/a/b/c'"),
        ({"method": "ngram", "revision": "v1"}, "revision is 'v1', of None"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_next_step(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}") as raised:
        configure(config, vocab_size=9)
    assert raised.value.hint


@pytest.mark.parametrize(
    "method",
    ["mtp", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "longcat_flash_mtp", "nextn"],
)
def test_every_family_has_its_name_for_mtp(method: str, tmp_path: Path) -> None:
    host = host_for(target_for(tmp_path))
    path = TinyMtp(vocab=VOCAB_SIZE).write(tmp_path / "head")
    made = create({"method": method, "model": str(path)}, vocab_size=VOCAB_SIZE, host=host)
    assert made.name == "mtp"


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("EAGLE3", "eagle3"), ("draft-eagle3", "eagle3"), ("EAGLE", "eagle"), ("NEXTN", "mtp"),
        ("draft-mtp", "mtp"), ("draft-dflash", "dflash"), ("draft-dspark", "dspark"), ("NGRAM", "ngram"),
        ("draft-simple", "model"), ("STANDALONE", "model"), ("draft_model", "model"),
        ("ngram-mod", "ngram"), ("ngram-cache", "suffix"),
    ],
)  # fmt: skip
def test_other_engines_names_mean_the_same(method: str, name: str) -> None:
    assert canonical(method) == name


def test_a_model_alone_tells_its_method(tmp_path: Path) -> None:
    host = host_for(target_for(tmp_path))
    paths = {
        "eagle3": EAGLE3.write(tmp_path / "a"),
        "peagle": TinyPeagle(vocab=VOCAB_SIZE).write(tmp_path / "b"),
        "mtp": TinyMtp(vocab=VOCAB_SIZE).write(tmp_path / "c"),
        "dflash": TinyBlock(target_layers=8, vocab=VOCAB_SIZE).write(tmp_path / "d"),
        "model": write_model(tmp_path / "e.gguf", layers=1),
    }
    for name, path in paths.items():
        found = configure({"model": str(path), "num_speculative_tokens": 3}, vocab_size=VOCAB_SIZE, host=host)
        assert [its.name for its in found.drafters] == [name]
        assert found.draft_length == 3
        assert configure(f"any:{path}", vocab_size=VOCAB_SIZE, host=host).drafters == found.drafters
    folder = TinyFolder(family="llama").write(tmp_path / "f")
    with pytest.raises(UsageError, match="is a complete model and has no option 'dtype'"):
        create({"model": str(folder), "dtype": "q4"}, vocab_size=VOCAB_SIZE, host=host)
    with pytest.raises(UsageError, match="is a head and has no option 'vocabulary'"):
        create({"model": str(paths["mtp"]), "vocabulary": "same"}, vocab_size=VOCAB_SIZE, host=host)
    head = create(
        {"model": str(paths["mtp"]), "max_model_len": 64, "dtype": "q4"}, vocab_size=VOCAB_SIZE, host=host
    )
    assert head.name == "mtp"
    parallel = {"method": "eagle3", "model": str(paths["peagle"]), "parallel_drafting": True}
    assert create(parallel, vocab_size=VOCAB_SIZE, host=host).name == "peagle"


def test_the_flag_takes_one_object_or_a_list() -> None:
    one, other = {"method": "ngram", "prompt_lookup_max": 4}, {"method": "suffix"}
    assert EngineFlags(speculative_config='{"method": "ngram", "prompt_lookup_max": 4}').speculation() == [
        one
    ]
    text = '[{"method": "ngram", "prompt_lookup_max": 4}, {"method": "suffix"}]'
    assert EngineFlags(speculative_config=text).speculation() == [one, other]
    for wrong in ("[]", "[1]", "7", "{", '"ngram"', "[" * 100_000):
        with pytest.raises(UsageError, match="--speculative-config is not"):
            EngineFlags(speculative_config=wrong).speculation()
    assert [its.name for its in configure([one, other], vocab_size=9).drafters] == ["ngram", "suffix"]
    assert replace(EngineFlags(), speculative_config=None).speculation() == "auto"
