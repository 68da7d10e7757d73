"""What it takes to run public code that drafts: its target, its checkpoints, imports that would fail.

What these packages import beside their models - trainers, web pages - is not there and not needed. DeepSpec
and the newer half of SafeAILab's code are in no package: ORACLE_SOURCES names a folder with clones of both.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than what is compiled

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from support.public_rounds import Round

SOURCES = Path(os.environ.get("ORACLE_SOURCES", "/nowhere"))


class PublicDrafter(Protocol):
    """A checkpoint as public code runs it."""

    def play(self, texts: Sequence[Sequence[int]], count: int) -> list[Round]:
        """Draft `count` tokens behind texts of which each continues the one before."""

    def save(self, path: Path) -> None:
        """Write the checkpoint as this code writes it; those that cannot have no such method."""


class TextByText:
    """Base of those that draft behind each text alone, and that transformers saves."""

    model: Any

    def play(self, texts: Sequence[Sequence[int]], count: int) -> list[Round]:
        return [self._draft(text, count) for text in texts]

    def save(self, path: Path) -> None:
        self.model.save_pretrained(path)

    def _draft(self, text: Sequence[int], count: int) -> Round:
        raise NotImplementedError


class PublicTarget:
    """A folder run by transformers in float32.

    Args:
        dtype: of what it hands to drafters: states, and the two matrices that some borrow.

    Attributes:
        model: the causal language model.
        embedding, head: its own, in that dtype.
    """

    def __init__(self, path: Path, dtype: Any = torch.float32) -> None:
        self.path, self.dtype = path, dtype
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.embedding = copy.deepcopy(self.model.get_input_embeddings()).to(dtype)
        self.head = copy.deepcopy(self.model.lm_head).to(dtype)

    def raw(self, tokens: Sequence[int]) -> Any:
        """[1, n, width] what the final norm reads."""
        seen: list[Any] = []
        norm = self.model.get_decoder().norm
        hook = norm.register_forward_pre_hook(lambda _module, given: seen.append(given[0].detach()))
        self.states(tokens)
        hook.remove()
        return seen[0].to(self.dtype)

    def states(self, tokens: Sequence[int]) -> list[Any]:
        """[1, n, width] each: the embedding's, every layer's, the last one's normalised."""
        with torch.inference_mode():
            found = self.model(row(tokens), output_hidden_states=True).hidden_states
            return [states.to(self.dtype) for states in found]


def row(tokens: Sequence[int]) -> Any:
    """[1, n] ids."""
    return torch.tensor([list(tokens)])


def round_of(text: Sequence[int], drafts: Sequence[int], logits: Any, sure: Any = None) -> Round:
    """What was drafted; `sure` are logits of chances."""
    rows = np.stack([row.detach().float().numpy() for row in logits])
    chances = np.zeros(0) if sure is None else torch.sigmoid(sure.detach().float()).numpy().reshape(-1)
    return Round(list(text), [int(token) for token in drafts], rows, chances)


def settings_of(path: Path) -> dict[str, Any]:
    """config.json of a folder."""
    settings: dict[str, Any] = json.loads((path / "config.json").read_text())
    return settings


def weights_of(path: Path) -> dict[str, Any]:
    """Tensors of a folder by name."""
    return dict(load_file(path / "model.safetensors"))


def loaded(model: Any, path: Path, target: PublicTarget) -> Any:
    """Give a model the weights of a folder, all of them, and those that it borrows from its target."""
    found = {name: values for name, values in model.named_buffers() if name in ("d2t", "t2d")}
    lent = {"embed_tokens.weight": target.embedding.weight.detach()} if hasattr(model, "embed_tokens") else {}
    model.load_state_dict(found | lent | weights_of(path))
    return model.to(target.dtype).eval()


def write(path: Path, weights: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """A folder, as authors write it whose models have no save_pretrained."""
    path.mkdir(parents=True)
    save_file({name: values.contiguous() for name, values in weights.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(settings))


def mapped(model: Any, own: int) -> int:
    """The target's id of an id that a head drafts."""
    table = getattr(model, "d2t", None)
    return own if table is None else own + int(table[own])


class Tap:
    """Keeps what a module returns."""

    def __init__(self, module: Any) -> None:
        self.seen: list[Any] = []
        module.register_forward_hook(lambda _module, _given, made: self.seen.append(made.detach()))

    def take(self) -> list[Any]:
        """What was seen since the call before, [rows, width] each."""
        seen = [made.reshape(-1, made.shape[-1]) for made in self.seen]
        self.seen.clear()
        return seen


class Absent(ModuleType):
    """Stands in for a package that is imported beside the models and never used."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if within := sys.modules.get(f"{self.__name__}.{name}"):
            return within
        return type(name, (), {"__init__": lambda _self, *_given, **_named: None})


def leave_out(*names: str) -> None:
    """Let imports of these packages succeed where they are not installed."""
    for name in names:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = Absent(name)


def bypass(package: str) -> None:
    """Let modules within a package be imported without what its own __init__ and its parents' import."""
    if package in sys.modules:
        return
    names = package.split(".")
    found = importlib.util.find_spec(names[0])
    assert found is not None
    assert found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0])
    for i in range(1, len(names) + 1):
        name = ".".join(names[:i])
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = [str(folder.joinpath(*names[1:i]))]
            sys.modules[name] = module


def speculator(path: Path, target: PublicTarget) -> Any:
    """Load a checkpoint of speculators; its configuration names the target."""
    leave_out("datasets", "hs_connectors")
    from speculators import SpeculatorModel, SpeculatorModelConfig

    settings = settings_of(path)
    settings["speculators_config"] = {
        "algorithm": settings["speculators_model_type"],
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": str(target.path), "architectures": []},
    }
    (path / "config.json").write_text(json.dumps(settings))
    config = SpeculatorModelConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(path, config=config, dtype=target.dtype)
    if hasattr(model, "verifier_lm_head"):
        for name in ("embed_tokens", "lm_head"):
            if name + ".weight" not in weights_of(path):
                # Its sign for what the target has to lend, which transformers wipes out.
                getattr(model, name).weight.data.fill_(torch.nan)
        model.load_verifier_weights()
    return model.to(target.dtype).eval()


def reach_deepspec() -> None:
    """Make DeepSpec's modules importable."""
    if str(SOURCES / "DeepSpec") not in sys.path:
        sys.path.append(str(SOURCES / "DeepSpec"))
    bypass("deepspec")


def qwen3(path: Path) -> Any:
    """The configuration of a folder whose author's model takes Qwen 3's."""
    config = Qwen3Config(**settings_of(path))
    config._attn_implementation = "sdpa"
    return config
