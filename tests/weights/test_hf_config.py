"""config.json in GGUF's terms: exact keys, and everything unknown refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ModelFileError, PacelineError, UnsupportedModelError
from paceline.weights import hf_rope
from paceline.weights.hf_config import FAMILIES, head_dim, tied, translate
from support.folders import OF_FAMILY, TinyFolder

COMMON = {
    "context_length": 512,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": 258,
    "rope.freq_base": 10000.0,
}


def of(family: str, **changes: Any) -> dict[str, Any]:
    """The family's config.json; a change to `...` leaves the setting out."""
    config = {**TinyFolder(family=family).config(), **changes}
    return {name: value for name, value in config.items() if value is not ...}


def translated(family: str, **changes: Any) -> dict[str, Any]:
    """The metadata without the architecture's name in front."""
    found = translate(of(family, **changes))
    architecture = found.pop("general.architecture")
    return {name.removeprefix(f"{architecture}."): value for name, value in found.items()}


@pytest.mark.parametrize(
    ("family", "architecture", "more"),
    [
        ("llama", "llama", {}),
        ("mistral", "llama", {}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
        (
            "qwen3_moe",
            "qwen3moe",
            {
                "expert_count": 4,
                "expert_used_count": 2,
                "expert_feed_forward_length": 32,
                "expert_weights_norm": True,
            },
        ),
        (
            "gemma3_text",
            "gemma3",
            {
                "block_count": 6,
                "rope.freq_base": 1e6,
                "attention.sliding_window": 64,
                "attention.sliding_window_pattern": 6,
            },
        ),
        ("phi3", "phi3", {"attention.head_count": 2, "attention.head_count_kv": 1}),
    ],
)
def test_each_family(family: str, architecture: str, more: dict[str, Any]) -> None:
    assert translate(of(family))["general.architecture"] == architecture
    assert translated(family) == {**COMMON, **more}


def test_every_family_has_a_tiny_folder() -> None:
    assert set(FAMILIES) == set(OF_FAMILY)


def test_what_is_left_out_is_what_transformers_assumes() -> None:
    assert translated("llama", num_key_value_heads=...)["attention.head_count_kv"] == 4
    assert translated("mistral", num_key_value_heads=...)["attention.head_count_kv"] == 8
    assert translated("mistral", sliding_window=...)["attention.sliding_window"] == 4096
    assert translated("qwen2", num_key_value_heads=None)["attention.head_count_kv"] == 4
    assert translated("llama", head_dim=...)["attention.key_length"] == 16
    assert translated("llama", head_dim=None)["attention.key_length"] == 16
    assert translated("qwen3", head_dim=...)["attention.key_length"] == 128
    assert translated("gemma3_text", head_dim=..., query_pre_attn_scalar=...)["attention.key_length"] == 256
    assert translated("llama", rms_norm_eps=...)["attention.layer_norm_rms_epsilon"] == 1e-6
    assert translated("phi3", rms_norm_eps=...)["attention.layer_norm_rms_epsilon"] == 1e-5
    assert translated("llama", rope_parameters=...)["rope.freq_base"] == 10000.0
    assert translated("qwen3_moe", norm_topk_prob=...)["expert_weights_norm"] is False
    assert tied(of("llama", tie_word_embeddings=...)) is False
    assert tied(of("gemma3_text", tie_word_embeddings=...)) is True


def test_experts_by_their_newer_name() -> None:
    assert translated("qwen3_moe", num_experts=..., num_local_experts=8)["expert_count"] == 8


@pytest.mark.parametrize(("family", "window"), [("mistral", 128), ("phi3", 128)])
def test_a_window_on_every_layer(family: str, window: int) -> None:
    assert translated(family, sliding_window=window)["attention.sliding_window"] == window


def test_a_window_that_is_off_is_no_window() -> None:
    found = translated("qwen2", sliding_window=4096, use_sliding_window=False, max_window_layers=1)
    assert "attention.sliding_window" not in found


def test_gemma_of_another_period() -> None:
    found = translated(
        "gemma3_text",
        layer_types=["sliding_attention", "full_attention"] * 3,
        query_pre_attn_scalar=168,
        final_logit_softcapping=30.0,
    )
    assert found["attention.sliding_window_pattern"] == 2
    assert found["attention.scale"] == pytest.approx(168**-0.5)
    assert found["final_logit_softcapping"] == 30.0


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"attention_multiplier": 0.1}, "config.json sets attention_multiplier = 0.1, which is not"),
        ("llama", {"hidden_act": "gelu"}, "config.json sets hidden_act = gelu"),
        ("gemma3_text", {"hidden_activation": "silu"}, "config.json sets hidden_activation = silu"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "sets use_bidirectional_attention = True"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "sets decoder_sparse_step = 2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"sets mlp_only_layers = \[0\]"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "weights are quantised by 'gptq'"),
        ("qwen2", {"use_sliding_window": True}, "switches sliding windows on for some layers"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows on for some"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 6}, None),
        (
            "gemma3_text",
            {"layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 2},
            "layer_types do not make every 5th layer full",
        ),
        ("llama", {"rope_parameters": {"rope_type": "wavelet"}}, "rope scaling 'wavelet' does not run here"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 1}},
            "config.json sets twist for linear rope",
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "truncate": False,
                    "original_max_position_embeddings": 256,
                }
            },
            "yarn rope with truncate = false",
        ),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(
    family: str, changes: dict[str, Any], named: str | None
) -> None:
    if named is None:
        assert translated(family, **changes)["attention.sliding_window_pattern"] == 1
        return
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        translate(of(family, **changes))
    assert caught.value.hint


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"model_type 'lama' does not run here\nhint: did you mean 'llama'"
    ):
        translate(of("llama", model_type="lama"))
    with pytest.raises(UnsupportedModelError, match="model_type None does not run here"):
        translate(of("llama", model_type=...))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "config.json has hidden_size = None, not a positive whole number"),
        ({"hidden_size": -1}, "hidden_size = -1"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers = 2.0"),
        ({"vocab_size": True}, "vocab_size = True"),
        ({"rms_norm_eps": 0}, "config.json has rms_norm_eps = 0, not a positive number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps = nan"),
        ({"num_attention_heads": 3, "head_dim": None}, "config.json has 3 heads for a width of 64"),
        ({"rope_parameters": "linear"}, "rope settings are linear, not an object"),
        ({"rope_parameters": {"rope_type": "linear"}}, "config.json has factor = None"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta = -1"),
        ({"partial_rotary_factor": 0.01}, "config.json lets 0 of 32 dimensions rotate"),
        ({"partial_rotary_factor": 1.5}, "config.json lets 48 of 32 dimensions rotate"),
    ],
)
def test_what_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        translate(of("llama", **changes))
    assert caught.value.hint


# Rope

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope(**changes: Any) -> dict[str, Any]:
    found = translated("llama", **changes)
    return {name: value for name, value in found.items() if name.startswith("rope.")}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_parameters": ..., "rope_theta": 5e5}, {"rope.freq_base": 5e5}),
        ({"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": None}, {"rope.freq_base": 5e5}),
        (
            {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope.freq_base": 5e5, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            {
                "rope.freq_base": 1e4,
                "rope.scaling.type": "dynamic",
                "rope.scaling.factor": 2.0,
                "rope.scaling.original_context_length": 512,
            },
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "beta_fast": 16,
                }
            },
            {
                "rope.freq_base": 1e4,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
        ),
        ({"rope_parameters": LLAMA3}, {"rope.freq_base": 10000.0}),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"rope.freq_base": 1e4, "rope.dimension_count": 16},
        ),
        ({"partial_rotary_factor": 0.25}, {"rope.freq_base": 1e4, "rope.dimension_count": 8}),
    ],
)
def test_rope(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert rope(**changes) == expected


def test_yarn_with_a_magnitude_of_its_own() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    customary = 0.1 * math.log(4.0) + 1
    found = rope(rope_parameters={**yarn, "attention_factor": 1.0})
    assert found["rope.scaling.attn_factor"] == pytest.approx(1.0 / customary)
    found = rope(rope_parameters={**yarn, "mscale": 0.707, "mscale_all_dim": 1.0})
    scaled = (0.0707 * math.log(4.0) + 1) / customary
    assert found["rope.scaling.attn_factor"] == pytest.approx(scaled / customary)
    assert "rope.scaling.attn_factor" not in rope(rope_parameters={**yarn, "attention_factor": customary})


def test_llama_3_factors_go_from_one_to_the_whole() -> None:
    factors = hf_rope.tensors(of("llama", rope_parameters=LLAMA3), 32)["rope_freqs.weight"]
    waves = 2 * math.pi * 10000.0 ** (np.arange(0, 32, 2) / 32)
    assert factors.shape == (16,)
    assert (factors[waves < 64 / 4] == 1).all()
    assert (factors[waves > 64 / 1] == 8).all()
    between = factors[(waves >= 64 / 4) & (waves <= 64)]
    assert len(between)
    assert ((between > 1) & (between < 8)).all()
    assert (np.diff(factors) >= 0).all()


def test_longrope_becomes_two_tensors_and_a_magnitude() -> None:
    given_ = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + i for i in range(16)],
    }
    config = of("phi3", rope_parameters=given_, original_max_position_embeddings=128)
    found = hf_rope.tensors(config, head_dim(config))
    assert found["rope_factors_short.weight"].tolist() == [1.0] * 16
    assert found["rope_factors_long.weight"].tolist() == [1.0 + i for i in range(16)]
    values = translate(config)
    assert values["phi3.rope.scaling.type"] == "longrope"
    assert values["phi3.rope.scaling.original_context_length"] == 128
    assert values["phi3.rope.scaling.attn_factor"] == pytest.approx(
        math.sqrt(1 + math.log(4) / math.log(128))
    )
    with pytest.raises(
        ModelFileError, match=r"config.json's short_factor is \[1.0\], not a list of 16 numbers"
    ):
        hf_rope.tensors(of("phi3", rope_parameters={**given_, "short_factor": [1.0]}), 32)


def test_gemma_in_both_spellings() -> None:
    old = {"rope_parameters": ..., "rope_theta": 1e6, "rope_local_base_freq": 2e4}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    found = translated("gemma3_text", **new)
    assert found == translated("gemma3_text", **old, **scaling)
    assert (found["rope.freq_base"], found["rope.freq_base_swa"]) == (1e6, 2e4)
    assert (found["rope.scaling.type"], found["rope.scaling.factor"]) == ("linear", 8.0)


# Whatever it says

_odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "type"]), st.text(max_size=3)),
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(
        st.sampled_from(sorted({*of("phi3"), *of("gemma3_text"), *of("qwen3_moe")})), _odd, min_size=1
    ),
)
def test_odd_settings_are_refused_or_read(family: str, changes: dict[str, Any]) -> None:
    changes.pop("model_type", None)
    try:
        found = translate({**of(family), **changes})
        hint = "none needed"
        assert found["general.architecture"] == FAMILIES[family].architecture
    except PacelineError as error:
        hint = error.hint
    assert hint
