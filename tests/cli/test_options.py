"""Flags: each one must change what the engine is asked to do, from the command line and from its variable."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, get_args, get_type_hints

import pytest

from paceline.cli.main import VERBS, load_verb
from paceline.cli.options import EngineFlags, SamplingFlags, split_specs
from paceline.cli.verb import verb
from paceline.core import SamplingParams
from paceline.errors import UsageError

# One telling value per flag, as typed, and what it must become in `SamplingParams`.
SAMPLING: dict[str, tuple[str, Any]] = {
    "temperature": ("0.5", 0.5),
    "top_k": ("40", 40),
    "top_p": ("0.9", 0.9),
    "min_p": ("0.1", 0.1),
    "seed": ("7", 7),
    "max_tokens": ("9", 9),
    "min_tokens": ("2", 2),
    "stop": ("END of it", ("END of it",)),
    "stop_token_ids": ("3,4", (3, 4)),
    "ignore_eos": ("", True),
    "presence_penalty": ("0.5", 0.5),
    "frequency_penalty": ("-0.5", -0.5),
    "repetition_penalty": ("1.2", 1.2),
    "logit_bias": ("5=-1.5,6=2", {5: -1.5, 6: 2.0}),
    "verification": ("rejection", "rejection"),
}
ENGINE: dict[str, tuple[str, Any]] = {
    "speculate": ("ngram:min=2,max=4,suffix", ["ngram:min=2,max=4", "suffix"]),
    "num_speculative_tokens": ("3", "auto:num_speculative_tokens=3"),
    "speculative_config": ('{"method": "ngram"}', [{"method": "ngram"}]),
    "threads": ("2", 2),
    "quantize": ("q4", "q4"),
    "max_model_len": ("256", 256),
}


def parsed(arguments: list[str]) -> tuple[SamplingParams, EngineFlags]:
    """Run a verb made for this test and return what it was given."""
    import typer

    seen: list[tuple[SamplingParams, EngineFlags]] = []

    @verb
    def command(*, sampling: SamplingFlags, engine: EngineFlags) -> None:
        seen.append((sampling.params(), engine))

    app = typer.Typer(add_completion=False, context_settings={"auto_envvar_prefix": "PACELINE"})
    app.command()(command)
    assert app(arguments, standalone_mode=False) == 0
    return seen[0]


def flag_names(group: type, name: str) -> list[str]:
    hint = get_type_hints(group, include_extras=True)[name]
    return list(next(a for a in get_args(hint) if hasattr(a, "param_decls")).param_decls)


def as_typed(flag: str, value: str) -> list[str]:
    return [flag] if value == "" else [f"{flag}={value}"] if flag.startswith("--") else [flag, value]


def normal(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def test_the_tables_above_name_every_flag() -> None:
    assert set(SAMPLING) == {f.name for f in fields(SamplingFlags)}
    assert set(ENGINE) == {f.name for f in fields(EngineFlags)}


def test_every_sampling_parameter_has_a_flag_under_its_own_name() -> None:
    by_generate = {"n", "logprobs"}
    assert {f.name for f in fields(SamplingParams)} == set(SAMPLING) | by_generate
    assert by_generate <= {p.name for p in load_verb("generate").params}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_flag_and_its_variable_change_the_parameters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed, expected = SAMPLING[name]
    default, _ = parsed([])
    assert normal(getattr(default, name)) != expected
    for flag in flag_names(SamplingFlags, name):
        assert normal(getattr(parsed(as_typed(flag, typed))[0], name)) == expected
    monkeypatch.setenv(f"PACELINE_{name.upper()}", typed or "on")
    assert normal(getattr(parsed([])[0], name)) == expected


@pytest.mark.parametrize("name", ENGINE)
def test_an_engine_flag_and_its_variable_change_the_engine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def effect(engine: EngineFlags) -> Any:
        plain = name in ("threads", "quantize", "max_model_len")
        return getattr(engine, name) if plain else engine.speculation()

    typed, expected = ENGINE[name]
    assert effect(parsed([])[1]) != expected
    for flag in flag_names(EngineFlags, name):
        assert effect(parsed(as_typed(flag, typed))[1]) == expected
    monkeypatch.setenv(f"PACELINE_{name.upper()}", typed)
    assert effect(parsed([])[1]) == expected


def test_the_command_line_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEMPERATURE", "0.5")
    monkeypatch.setenv("PACELINE_STOP", "from the environment")
    params, _ = parsed(["--temp", "0.25", "--stop", "typed"])
    assert (params.temperature, list(params.stop)) == (0.25, ["typed"])


def test_a_list_variable_may_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_STOP", '["\\n\\n", "User: "]')
    assert list(parsed([])[0].stop) == ["\n\n", "User: "]


def test_no_two_flags_of_a_verb_share_a_name() -> None:
    for name in VERBS:
        spelt = [option for p in load_verb(name).params for option in p.opts if option.startswith("-")]
        assert len(spelt) == len(set(spelt)), name


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("off", ["off"]),
        ("off,auto", ["off", "auto"]),
        ("ngram:min=2,max=4", ["ngram:min=2,max=4"]),
        ("ngram:min=2,max=4, suffix:depth=8 ,auto", ["ngram:min=2,max=4", "suffix:depth=8", "auto"]),
        ("ngram,max=4", ["ngram", "max=4"]),
        ("", []),
    ],
)
def test_commas_part_drafters_and_options(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs


@pytest.mark.parametrize(
    "flags",
    [
        EngineFlags(speculate=["off", "ngram"]),
        EngineFlags(speculate=["off"], num_speculative_tokens="4"),
        EngineFlags(num_speculative_tokens="many"),
        EngineFlags(num_speculative_tokens="-1"),
        EngineFlags(speculate=["ngram"], speculative_config='{"method": "ngram"}'),
        EngineFlags(speculative_config="{"),
        EngineFlags(speculative_config="[1]"),
    ],
)
def test_contradictions_are_refused(flags: EngineFlags) -> None:
    with pytest.raises(UsageError):
        flags.speculation()


@pytest.mark.parametrize(
    "flags",
    [
        SamplingFlags(temperature=-1.0),
        SamplingFlags(top_p=0.0),
        SamplingFlags(stop=[""]),
        SamplingFlags(stop_token_ids=["3;4"]),
        SamplingFlags(logit_bias=["five=1"]),
        SamplingFlags(logit_bias=["5"]),
        SamplingFlags(verification="lossy"),
        SamplingFlags(max_tokens=1, min_tokens=2),
    ],
)
def test_values_out_of_range_are_usage_errors(flags: SamplingFlags) -> None:
    with pytest.raises(UsageError):
        flags.params()


@pytest.mark.parametrize(
    ("value", "message"), [('["unfinished', "is not JSON"), ("[null]", "holds more than strings")]
)
def test_a_list_variable_that_holds_no_list_of_strings_is_refused(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @verb
    def command(*, sampling: SamplingFlags, engine: Annotated[int, "unused"] = 0) -> None:
        pytest.fail("the verb must not run")

    monkeypatch.setenv("PACELINE_STOP", value)
    values = {f.name: getattr(SamplingFlags(), f.name) for f in fields(SamplingFlags)}
    assert command(**values, engine=0) == 2
    assert f"PACELINE_STOP {message}" in capsys.readouterr().err
