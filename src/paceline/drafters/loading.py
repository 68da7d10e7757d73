"""From the name of a draft model to a drafter for a given target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core import Drafter, Target
from paceline.drafters.memory import Memory, Remembering, key_of
from paceline.drafters.model import ModelDrafter
from paceline.drafters.network import Costs
from paceline.errors import UsageError, suggest
from paceline.text.pairing import Mode, pair
from paceline.text.respelling import Translator
from paceline.text.tokenizer import Tokenizer
from paceline.weights import hub
from paceline.weights.source import open_model

if TYPE_CHECKING:
    from paceline.drafters.beside import Found
    from paceline.models.memory import MemoryNeeds

LEAST_CONTEXT = 64
"""A draft model that sees less text than this is refused."""

_VOCABULARIES: dict[str, Mode | None] = {
    "auto": None,
    "same": "same",
    "intersection": "intersection",
    "text": "text",
}


@dataclass(frozen=True, slots=True)
class Outlined:
    """What a drafter would take.

    Attributes:
        kind: of the drafter.
        path: of its file or folder.
        stored: bytes of its weights in the file.
        context_limit: most tokens of text that it follows; None means as many as the target.
        heard: layers of the target whose states it is given.
        most_waiting: bytes of states that one text may have waiting for it.
    """

    kind: str
    path: Path
    needs: MemoryNeeds
    stored: int
    context_limit: int | None = None
    heard: int = 0
    most_waiting: int = 0


@dataclass(frozen=True, slots=True)
class Host:
    """The target that is drafted for.

    Attributes:
        vocab_size: rows of its logits.
        threads: that a draft model is to use; None means one per physical core.
        measure: finds the pass times of a draft model.
        models: draft models and heads that are loaded, by their options: each is loaded once.
        target: the model itself, which heads borrow weights from; None where there is none to borrow from.
        chances: file of what drafters learnt; None keeps nothing.
        found: what was found near the target's file, once it was looked for.
        outlines: None loads drafters; else none is loaded, and what they would take is told here.
    """

    tokenizer: Tokenizer
    vocab_size: int
    threads: int | None
    measure: Callable[[Target], Costs]
    models: dict[tuple[object, ...], Any] = field(default_factory=dict)
    target: Target | None = None
    chances: Path | None = None
    found: dict[Path, list[Found]] = field(default_factory=dict)
    outlines: list[Outlined] | None = None

    def remind(self, drafter: Remembering, *parts: object) -> None:
        """Let a drafter go on from what it learnt in earlier runs for this target.

        Args:
            parts: what its chances depend on besides the target.
        """
        lent = getattr(self.target, "lent", None)
        if self.chances is not None and lent is not None:
            drafter.remember(Memory(self.chances, key_of(lent.file.identity(), *parts)))

    def reset(self) -> None:
        """Make the loaded draft models forget all text and all they learnt."""
        for drafter in self.models.values():
            drafter.reset()


def vocabulary(value: object) -> str:
    if not isinstance(value, str) or value not in _VOCABULARIES:
        hint = suggest(str(value), list(_VOCABULARIES))
        raise UsageError(f"option vocabulary of model is {value!r}", hint)
    return value


def head_dtype(value: object) -> str:
    known = ["auto", "q8", "q4", "bf16", "f32"]
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"option dtype of a head is {value!r}", suggest(str(value), known))
    return value


def load_head(host: Host, model: str | None = None, **options: Any) -> Drafter:
    """Load a head, or find it loaded; see `head_loading.load_head`."""
    from paceline.drafters import head_loading  # the native part loads only when a model does

    return head_loading.load_head(host, model, **options)


def load_any(host: Host, model: str, **options: Any) -> Drafter:
    """Load what is at a path, a head or a complete model; options are those of both.

    Raises:
        UsageError: an option that is not for what was found.
    """
    from paceline.drafters.checkpoint import look_into

    path = hub.resolve(model)
    if look_into(path).kind == "model":
        _refuse_options(options, ("dtype", "draft_vocab_size"), f"{model} is a complete model")
        return load_model_drafter(host, str(path), **options)
    _refuse_options(options, ("vocabulary", "quantize"), f"{model} is a head")
    options.pop("max_model_len", None)  # a head follows as far as its target
    return load_head(host, str(path), **options)


def _refuse_options(options: dict[str, Any], names: tuple[str, ...], what: str) -> None:
    if wrong := [name for name in names if name in options]:
        raise UsageError(f"{what} and has no option {wrong[0]!r}", "leave it out")


def found_drafter(host: Host) -> Drafter | None:
    """The drafter that lies with the target, loaded; see `head_loading.found_drafter`."""
    if getattr(host.target, "lent", None) is None:
        return None
    from paceline.drafters import head_loading

    return head_loading.found_drafter(host)


def load_model_drafter(
    host: Host,
    model: str,
    *,
    vocabulary: str = "auto",
    max_model_len: int | None = None,
    threads: int | None = None,
    quantize: str | None = None,
) -> ModelDrafter:
    """Load a draft model, or find it loaded.

    Args:
        model: as `LLM` takes it.
        vocabulary: how to bring the vocabularies together; "same" refuses a pair whose ids differ.
        max_model_len: most tokens it follows; None means its own limit, or as much as memory holds.

    Raises:
        UsageError: the pair cannot work as asked.
        ModelFileError, UnsupportedModelError, ResourceError: the model cannot be had, read or run.
    """
    key = (model, vocabulary, max_model_len, threads, quantize)
    known: ModelDrafter | None = host.models.get(key)
    if known is None:
        known = host.models[key] = _load(host, model, vocabulary, max_model_len, threads, quantize)
    return known


def _load(
    host: Host,
    model: str,
    vocabulary: str,
    max_model_len: int | None,
    threads: int | None,
    quantize: str | None,
) -> ModelDrafter:
    from paceline.models.target import NativeTarget  # the native part loads only when a model does

    with open_model(hub.resolve(model), quantize) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        threads = host.threads if threads is None else threads
        if host.outlines is not None:
            target = NativeTarget.outline(file, max_model_len=max_model_len)
        else:
            target = NativeTarget.load(file, threads=threads, max_model_len=max_model_len)
        identity, path = file.identity(), file.path
        stored = sum(info.nbytes for info in file.tensors.values())
        file.forget_arrays()
    if target.context_limit < LEAST_CONTEXT:
        raise UsageError(
            f"the draft model {model} sees only {target.context_limit} tokens",
            f"use one with a context of at least {LEAST_CONTEXT}",
        )
    mode = _VOCABULARIES[vocabulary]
    pairing = pair(host.tokenizer, tokenizer, host.vocab_size, target.vocab_size, mode)
    if mode == "same":
        pairing.comparison.refuse_unless_same()
    translator = Translator(host.tokenizer, tokenizer, pairing)
    drafter = ModelDrafter(target, translator, host.measure(target))
    if host.outlines is not None:
        host.outlines.append(Outlined("model", path, target.needs, stored, target.context_limit))
    host.remind(drafter, identity, pairing.mode)
    return drafter
