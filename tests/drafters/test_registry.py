"""From what a user writes to drafters, or to an error that says what to write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.drafters import registry
from paceline.drafters.loading import Host
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import UsageError
from support.draft_models import FixedCosts, draft_model
from support.stub_target import RandomRule
from support.tiny_tokenizer import tiny_tokenizer


def create(spec):
    return registry.create(spec, vocab_size=100, identity="test")


def configure(spec):
    return registry.configure(spec, vocab_size=100, identity="test")


def test_every_name_builds_a_drafter_of_that_name():
    lookups = [name for name, row in registry.REGISTRY.items() if "host" not in row.shared]
    assert {name: create(name).name for name in lookups} == {n: n for n in lookups}
    assert set(registry.names()) == {
        *("grammar", "ngram", "suffix", "prediction", "model"),
        *("eagle", "eagle3", "peagle", "mtp", "dflash", "dspark"),
    }


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("NGRAM", "ngram"),
        ("[ngram]", "ngram"),
        ("ngram-simple", "ngram"),
        ("ngram_mod", "ngram"),
        ("prompt_lookup", "ngram"),
        ("suffix_decoding", "suffix"),
        ("ngram-cache", "suffix"),
    ],
)
def test_names_of_other_engines_are_understood(spec, name):
    assert create(spec).name == name


@pytest.mark.parametrize(
    "spec",
    [
        "ngram:min=3,max=5",
        {"method": "ngram", "min": 3, "max": 5},
        {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": "5"},
    ],
)
def test_options_in_both_spellings(spec):
    drafter = create(spec)
    assert isinstance(drafter, NgramDrafter)
    assert (drafter.shortest, drafter.longest) == (3, 5)


def test_off_auto_one_and_several():
    assert configure("off").drafters == []
    assert [d.name for d in configure("auto").drafters] == ["grammar", "suffix", "prediction"]
    assert [d.name for d in configure("ngram").drafters] == ["ngram"]
    assert [d.name for d in configure(["ngram", {"method": "suffix"}]).drafters] == ["ngram", "suffix"]


def test_a_fixed_draft_length_goes_to_the_planner():
    assert configure("auto").draft_length is None
    assert configure({"method": "ngram", "num_speculative_tokens": 5}).draft_length == 5
    assert configure("auto:num_speculative_tokens=3").draft_length == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ngrm", r"no drafter 'ngrm'\nhint: did you mean 'ngram'"),
        ("warp-drive", r"no drafter 'warp-drive'\nhint: known: "),
        ("ngram:mxa=3", r"ngram has no option 'mxa'\nhint: did you mean 'max'"),
        ("ngram:max", r"'max' without a value\nhint: write ngram:max=VALUE"),
        ("ngram:max=many", r"option max of ngram is 'many'"),
        ({"max": 3}, r"method of a drafter is"),
        ({"method": 3}, r"method of a drafter is"),
        ({"method": "ngram", "max": 2.5}, r"option max of ngram is 2.5\nhint: give a whole number"),
        ({"method": "suffix", "file": 5}, r"option file of suffix is 5\nhint: give a path"),
        ("ngram:min=9,max=3", r"min=9, max=3"),
        ({"method": "ngram", "num_speculative_tokens": 0}, r"num_speculative_tokens is 0"),
        ({"method": "ngram", "num_speculative_tokens": "lots"}, r"num_speculative_tokens is 'lots'"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, r"num_speculative_tokens is 2.5"),
        ({"method": "ngram", "num_speculative_tokens": True}, r"num_speculative_tokens is True"),
        (["ngram", "ngram"], r"'ngram' is given twice"),
        (["off", "ngram"], r"'off' cannot be combined"),
        ([], r"no drafter is given"),
        (7, r"speculate is 7"),
        ([7], r"speculate is \[7\]"),
        ("auto:file=x", r"auto has no option 'file'"),
        ("", r"no drafter ''"),
        ("model", r"drafter 'model' needs a model\nhint: write model:MODEL"),
        ("draft-model:vocabulary=text", r"needs a model"),
        ("model:a.gguf,vocabulary=some", r"option vocabulary of model is 'some'"),
        ("model:a.gguf,max_model_len=x", r"option max_model_len of model is 'x'"),
        ("model:a.gguf,b.gguf", r"'b.gguf' without a value"),
        ({"method": "model", "modle": "a.gguf"}, r"model has no option 'modle'\nhint: did you mean 'model'"),
    ],
)
def test_what_cannot_mean_anything_is_refused_with_the_next_step(spec, message):
    with pytest.raises(UsageError, match=message):
        configure(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "model:org/name:Q4_K_M,max_model_len=99",
        "draft-model:model=org/name:Q4_K_M,max_model_len=99",
        {"method": "draft_model", "model": "org/name:Q4_K_M", "max_model_len": 99},
        {"method": "draft-simple", "draft_model": "org/name:Q4_K_M", "max_model_len": "99"},
    ],
)
def test_a_draft_model_is_named_in_every_spelling(spec, monkeypatch):
    """Its options are checked without a target; with one it is loaded, once."""
    assert configure(spec).drafters == []
    asked = []
    row = registry.REGISTRY["model"]
    loaded = draft_model(RandomRule(100))

    def build(**options):
        asked.append(options)
        return loaded

    monkeypatch.setitem(registry.REGISTRY, "model", replace(row, build=build))
    host = Host(tiny_tokenizer(), 100, None, FixedCosts)
    assert registry.configure(spec, vocab_size=100, host=host).drafters == [loaded]
    assert asked == [{"model": "org/name:Q4_K_M", "max_model_len": 99, "host": host}]


def test_a_path_may_hold_what_options_are_made_of():
    host_rows = registry.REGISTRY["model"]
    assert host_rows.first == "model"
    assert registry._parse("model:/a/b=c.gguf,vocabulary=text") == (
        "model",
        {"model": "/a/b=c.gguf", "vocabulary": "text"},
    )
    assert registry._parse("model:C:/models/x.gguf") == ("model", {"model": "C:/models/x.gguf"})
