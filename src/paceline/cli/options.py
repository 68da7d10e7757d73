"""The flags that verbs share, as dataclasses: a field is a flag, its environment twin is PACELINE_<FIELD>.

A verb takes such a dataclass as a parameter, and `verb.verb` unfolds it into flags. So adding a flag is
adding a field here, and every verb that takes the group has it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import typer

from paceline.core import SamplingParams
from paceline.errors import RequestError, UsageError

DEMO_MODEL = "smollm2"

MODEL_VARIABLE = "PACELINE_MODEL"

Model = Annotated[
    str,
    typer.Argument(
        help="A .gguf file, a folder, an alias (smollm2) or org/name[:quant]", envvar=MODEL_VARIABLE
    ),
]


def _flag(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **more)


def list_flag(*names: str, help: str) -> Any:
    # typer would split the variable at spaces, which stop strings may hold; `_from_environment` reads it.
    variable = "PACELINE_" + names[0].strip("-").replace("-", "_").upper()
    return typer.Option(*names, help=f"{help}  [env var: {variable}]", allow_from_autoenv=False)


Quantize = Annotated[str | None, _flag("--quantize", help="Round a folder's weights while loading: q8 or q4")]

Threads = Annotated[
    int | None, _flag("--threads", "-t", min=1, max=256, help="Default: one per physical core")
]


@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """How the model is loaded."""

    threads: Threads = None
    quantize: Quantize = None
    max_model_len: Annotated[
        int | None,
        _flag("--max-model-len", "--ctx-size", "-c", min=1, help="Most tokens of prompt and answer together"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineFlags(MachineFlags):
    """How the model is loaded and how it speculates."""

    speculate: Annotated[
        list[str],
        list_flag("--speculate", "--drafter", help="off, auto, or NAME[:key=value,...]; several combine"),
    ] = field(default_factory=list)
    num_speculative_tokens: Annotated[
        str,
        _flag("--num-speculative-tokens", help="Draft exactly N tokens per pass, or auto: as many as pay"),
    ] = "auto"
    speculative_config: Annotated[
        str | None, _flag("--speculative-config", help="vLLM's JSON for the same, instead of --speculate")
    ] = None

    def speculation(self) -> str | list[str | dict[str, Any]]:
        """Return what `LLM(speculate=...)` takes.

        Raises:
            UsageError: the flags contradict each other.
        """
        if self.speculative_config is not None:
            if self.speculate or self.num_speculative_tokens != "auto":
                raise UsageError(
                    "--speculative-config excludes the other speculation flags", "use one or the other"
                )
            return _configs(self.speculative_config)
        specs = [spec for text in self.speculate or ["auto"] for spec in split_specs(text)]
        if not specs:
            raise UsageError("--speculate names no drafter", "give off, auto, or a drafter's name")
        if "off" in specs:
            if len(specs) > 1 or self.num_speculative_tokens != "auto":
                raise UsageError(
                    "--speculate off excludes every other speculation flag", "leave the others out"
                )
            return "off"
        if self.num_speculative_tokens != "auto":
            length = self.num_speculative_tokens
            if not length.isdecimal():
                raise UsageError(f"--num-speculative-tokens is {length!r}", "give a whole number or auto")
            specs = [f"{s}{',' if ':' in s else ':'}num_speculative_tokens={length}" for s in specs]
        return specs[0] if len(specs) == 1 else list(specs)


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """vLLM's names; see `core.SamplingParams` for their meaning."""

    temperature: Annotated[
        float, _flag("--temperature", "--temp", help="0 always takes the likeliest token")
    ] = 0.0
    top_k: Annotated[int, _flag("--top-k", help="Keep the k likeliest tokens; 0 keeps all")] = 0
    top_p: Annotated[
        float, _flag("--top-p", help="Keep the likeliest tokens that reach this probability")
    ] = 1.0
    min_p: Annotated[
        float, _flag("--min-p", help="Drop tokens less likely than this times the likeliest")
    ] = 0.0
    seed: Annotated[int | None, _flag("--seed", "-s", help="Default: drawn, and reported")] = None
    max_tokens: Annotated[
        int | None, _flag("--max-tokens", "-n", help="Default: up to the context limit")
    ] = None
    min_tokens: Annotated[int, _flag("--min-tokens", help="No stop token before this many")] = 0
    stop: Annotated[list[str], list_flag("--stop", help="End before this text; several may be given")] = (
        field(default_factory=list)
    )
    stop_token_ids: Annotated[
        list[str], list_flag("--stop-token-ids", help="End at these ids, besides the model's own")
    ] = field(default_factory=list)
    ignore_eos: Annotated[bool, _flag("--ignore-eos", help="Write on past the model's own end")] = False
    presence_penalty: Annotated[float, _flag("--presence-penalty", help="-2 to 2")] = 0.0
    frequency_penalty: Annotated[float, _flag("--frequency-penalty", help="-2 to 2")] = 0.0
    repetition_penalty: Annotated[
        float, _flag("--repetition-penalty", "--repeat-penalty", help="1 is none")
    ] = 1.0
    logit_bias: Annotated[
        list[str], list_flag("--logit-bias", help="ID=BIAS added to a token's logit; several may be given")
    ] = field(default_factory=list)
    verification: Annotated[
        str, _flag("--verification", help="coupled: same bytes as plain; rejection: same distribution")
    ] = "coupled"

    def params(self, **more: Any) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            UsageError: a value out of range.
        """
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)} | more
        values["stop_token_ids"] = [
            _whole("--stop-token-ids", i) for t in self.stop_token_ids for i in t.split(",")
        ]
        values["logit_bias"] = dict(_bias(pair) for text in self.logit_bias for pair in text.split(","))
        try:
            return SamplingParams.from_mapping(values)
        except RequestError as error:
            raise UsageError(error.message, error.hint) from None


def split_specs(text: str) -> list[str]:
    """Part a comma list of drafters whose options hold commas too: "ngram:min=2,max=4,suffix" is two."""
    specs: list[str] = []
    for piece in filter(None, (p.strip() for p in text.split(","))):
        if specs and ":" in specs[-1] and re.match(r"[\w-]+=", piece):
            specs[-1] += f",{piece}"
        else:
            specs.append(piece)
    return specs


def _configs(text: str) -> list[str | dict[str, Any]]:
    """The objects of --speculative-config: one in JSON, or a list of them."""
    name, hint = "--speculative-config", 'write {"method": "ngram"}, or a list of such objects'
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not JSON: {str(error) or 'nested too deep'}", hint) from None
    configs = value if isinstance(value, list) else [value]
    if not configs or not all(isinstance(config, dict) for config in configs):
        raise UsageError(f"{name} is not a JSON object", hint)
    return list(configs)


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} has {text!r}", "give token ids, parted by commas") from None


def _bias(pair: str) -> tuple[int, float]:
    token, _, bias = pair.replace(":", "=").partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(f"--logit-bias has {pair!r}", "write ID=BIAS, as in 42=-1.5") from None
