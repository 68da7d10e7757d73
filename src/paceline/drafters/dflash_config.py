"""What the config.json of a block drafter says, checked: DFlash (arXiv 2602.06036) and DSpark (2607.05147).

Five layouts are told apart by their keys: z-lab's and SpecForge's (`dflash_config`), speculators'
(`speculators_model_type`), DeepSpec's (everything at the top) and GGUF's. They count the target's layers
by whose output is read, or, speculators and GGUF, by whose input. What decides the shape of a weight is
read off the weight; what no weight tells must be said, since a wrong guess shows in nothing but poor drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.head_config import SLIDING, decoder_config, layer_kinds, windows
from paceline.errors import UnsupportedModelError
from paceline.models.config import DecoderConfig
from paceline.weights import hf_rope

MarkovKind = Literal["vanilla", "gated", "rnn"]

MOST_SLOTS = 64

_ANOTHER = "it was made for another model"
_CHECK = "check that the whole checkpoint was downloaded, and that it is a DFlash or DSpark drafter"
_RELATIVES = {
    "DFlash2": "DFlash2, which mixes neighbours by convolutions",
    "DFlashLaguna": "Laguna's DFlash, which gates its heads",
    "Gemma4": "a drafter for Gemma 4",
    "Lfm2": "a drafter for LFM2",
    "Domino": "Domino",
}
"""By a part of the architecture's name: drafters of the same kind that do not run here."""

_INNER = {
    "mask_token_id", "target_layer_ids", "block_size", "causal", "attention_mode", "projector_type",
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "confidence_head_alpha", "num_anchors", "sample_from_anchor", "final_logit_softcapping",
}  # fmt: skip
"""Settings within dflash_config that run; others must be absent, off, or factors of one."""


@dataclass(frozen=True, slots=True)
class Markov:
    """A head that adds to each slot's logits what the token before suggests, through `rank` dimensions."""

    kind: MarkovKind
    rank: int


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """A block drafter's sizes and conventions.

    Attributes:
        decoder: of the drafter's own layers.
        causal: of each layer, whether a slot of the block sees only the slots before it.
        taps: layers of the target whose input is read, in the order they are put side by side.
        block: slots, the anchor among them.
        mask: token that fills the slots behind the anchor.
        anchor_first: whether slot k predicts the token behind it, the anchor's slot too; else slot k
            predicts its own token and the anchor's slot nothing.
        vocab: rows of the embedding.
        markov: None for plain DFlash.
        confidence: whether it says itself how sure it is.
    """

    decoder: DecoderConfig
    causal: tuple[bool, ...]
    taps: tuple[int, ...]
    block: int
    mask: int
    anchor_first: bool
    vocab: int
    markov: Markov | None
    confidence: bool

    @property
    def first(self) -> int:
        """The first slot that predicts."""
        return 0 if self.anchor_first else 1

    @property
    def slots(self) -> int:
        """Tokens that one block drafts."""
        return self.block - self.first


def read_config(found: Checkpoint, *, layers: int, sample_from_anchor: bool | None = None) -> BlockConfig:
    """Make sense of a checkpoint.

    Args:
        layers: of the target.
        sample_from_anchor: what to take where the file should say it and does not.

    Raises:
        ModelFileError: a setting is missing, contradicts another or a weight, or belongs to another target.
        UnsupportedModelError: a relative that does not run here, by name.
    """
    keys = _Keys(found)
    _refuse_relatives(keys)
    made_for = keys.get("num_target_layers")
    if made_for is not None and made_for != layers:
        keys.refuse(f"a drafter for a model of {str(made_for)[:20]} layers; this one has {layers}", _ANOTHER)
    kinds = layer_kinds(found, keys.size("num_hidden_layers"))
    markov, confidence = _markov(keys), found.has("confidence_head.proj.weight")
    return BlockConfig(
        decoder=_decoder(keys, kinds),
        causal=_causal(keys, kinds),
        taps=_taps(keys, layers),
        block=_block(keys),
        mask=keys.size("mask_token_id", "noise_token_id", least=0),
        anchor_first=_anchor_first(keys, sample_from_anchor, markov is not None or confidence),
        vocab=keys.size("vocab_size"),
        markov=markov,
        confidence=confidence,
    )


class _Keys:
    """Settings of all layouts under one name each."""

    def __init__(self, found: Checkpoint) -> None:
        self.found = found
        self.place = "the file" if found.layout == "GGUF" else "config.json"
        self.inner: dict[str, Any] = {}
        for name in ("dspark_config", "dflash_config"):
            value = found.settings.get(name) or {}
            if not isinstance(value, Mapping):
                self.refuse(f"config.json's {name} is {str(value)[:60]}, not an object", _CHECK)
            self.inner |= value

    def get(self, *names: str) -> Any:
        """A setting, or None; the drafter's own come before those it shares with other models."""
        for where in (self.inner, self.found.settings):
            for name in names:
                for key in (name, f"dspark_{name}"):
                    if where.get(key) is not None:
                        return where[key]
        return None

    def size(self, *names: str, least: int = 1) -> int:
        value = self.get(*names)
        if value is None:
            self.refuse(f"{self.place} has no {names[0]}", _CHECK)
        if type(value) is not int or not least <= value < 2**31:
            self.refuse(
                f"{self.place} has {names[0]} = {str(value)[:60]}, not a whole number from {least}", _CHECK
            )
        return value

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(f"{self.place} has {name} = {str(value)[:60]}, not true or false", _CHECK)
        return value

    def refuse(self, what: str, hint: str) -> NoReturn:
        raise self.found.fault(what, hint)

    def unsupported(self, what: str, hint: str = "that does not run here yet") -> NoReturn:
        raise UnsupportedModelError(f"{self.found.path}: {what}", hint)


def _refuse_relatives(keys: _Keys) -> None:
    if (keys.found.path / "mask_embedding.pt").exists():
        keys.unsupported("the embedding of its mask token is in a file of its own, mask_embedding.pt")
    made = " ".join(map(str, keys.get("architectures") or ()))
    for part, what in _RELATIVES.items():
        if part in made:
            keys.unsupported(f"{made} is {what}")
    for key, value in keys.inner.items():
        if key not in _INNER and not (value is None or value is False or (value is not True and value == 1)):
            keys.unsupported(
                f"dflash_config sets {key} = {str(value)[:60]}", "without it the guesses would be spoilt"
            )
    if (mode := keys.get("attention_mode")) not in (None, "gqa", "mha"):
        keys.unsupported(f"attention_mode = {mode!r}", "'gqa' and 'mha' run here")
    if (kind := keys.get("projector_type")) not in (None, "dflash", "dspark"):
        keys.unsupported(f"projector_type = {kind!r}", "'dflash' and 'dspark' run here")
    if (act := keys.get("hidden_act")) not in (None, "silu", "swish"):
        keys.unsupported(f"hidden_act = {act!r}", "'silu' runs here")


def _block(keys: _Keys) -> int:
    size = keys.size("block_size", least=2)
    if size > MOST_SLOTS:
        keys.unsupported(f"blocks of {size} slots", f"at most {MOST_SLOTS} run here")
    return size


def _decoder(keys: _Keys, kinds: Sequence[str]) -> DecoderConfig:
    config = decoder_config(keys.found)
    if len(kinds) != config.layers:
        keys.refuse(f"it describes {len(kinds)} layers, the weights are of {config.layers}", _CHECK)
    cap = keys.get("final_logit_softcapping")
    if cap is not None:
        config = replace(config, logit_cap=hf_rope.positive({"cap": cap}, "cap"))
    return replace(config, windows=windows(keys.found, config.layers))


def _causal(keys: _Keys, kinds: Sequence[str]) -> tuple[bool, ...]:
    """For all layers if the file says so, else in those with a window, as they are trained."""
    said = keys.flag("is_causal")
    if said is None:
        said = keys.flag("causal")
    if said is None and keys.flag("sliding_window_non_causal"):
        said = False
    if said is False and SLIDING in kinds and keys.size("sliding_window") < keys.size("block_size"):
        keys.unsupported("a window both ways that is shorter than its blocks")
    return tuple(kind == SLIDING if said is None else said for kind in kinds)


def _taps(keys: _Keys, layers: int) -> tuple[int, ...]:
    """Which inputs are read: given as such by speculators and GGUF, by the others as the outputs before."""
    name, shift = _TAPS.get(keys.found.layout, ("target_layer_ids", 1))
    ids = keys.get(name)
    if ids is None:
        keys.refuse(
            f"{keys.place} has no {name}",
            "which layers it reads cannot be guessed; take one that says",
        )
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        keys.refuse(f"{keys.place} has {name} = {str(ids)[:60]}", "it must be a list of whole numbers")
    taps = tuple(i + shift for i in ids)
    if list(taps) != sorted(set(taps)):
        keys.refuse(f"{keys.place} has {name} = {str(ids)[:60]}, which do not ascend", _CHECK)
    if taps[0] < 0 or taps[-1] > layers:
        keys.refuse(f"it reads layers {ids} of a target that has {layers}", _ANOTHER)
    return taps


_TAPS = {"speculators": ("aux_hidden_state_layer_ids", 0), "GGUF": ("target_layers", 0)}


def _anchor_first(keys: _Keys, told: bool | None, sparks: bool) -> bool:
    said, bonus = keys.flag("sample_from_anchor"), keys.flag("bonus_anchor")
    if said is None and bonus is not None:
        said = not bonus
    said = told if said is None else said
    if said is not None:
        return said
    made = " ".join(map(str, keys.get("architectures") or ()))
    if keys.found.layout == "speculators" and (sparks or "DSpark" in made):
        keys.refuse(
            "config.json has no sample_from_anchor, and exporters mean both by leaving it out",
            "write dspark:PATH,sample_from_anchor=true, or false, and keep the better one",
        )
    # DeepSpec's and SpecForge's DSpark are trained with the anchor's slot, z-lab's DFlash without.
    return sparks or "DSpark" in made


def _markov(keys: _Keys) -> Markov | None:
    """The weights decide; a config.json that says otherwise is refused."""
    said = keys.get("markov_rank") or 0
    rank = keys.found.shape("markov_head.markov_w1.weight")[-1] if said else 0
    if keys.found.has("markov_head.markov_w1.weight"):
        rank = keys.found.shape("markov_head.markov_w1.weight")[-1]
    if rank != said:
        keys.refuse(f"config.json has markov_rank = {str(said)[:20]}, the weights {rank}", _CHECK)
    if not rank:
        return None
    kind: MarkovKind = "vanilla"
    if keys.found.has("markov_head.gate_proj.weight"):
        kind = "gated"
    elif keys.found.has("markov_head.joint_proj.weight"):
        kind = "rnn"
    named = str(keys.get("markov_head_type") or "vanilla").lower()
    if named != kind:
        keys.refuse(f"config.json has markov_head_type = {named!r}, the weights are of a {kind} one", _CHECK)
    return Markov(kind, rank)
