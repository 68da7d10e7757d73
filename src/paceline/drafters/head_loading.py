"""From the path of a head's checkpoint to a drafter for a given target."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from paceline.core import Drafter, HearingDrafter, Target
from paceline.drafters.beside import Found, find_drafters
from paceline.drafters.checkpoint import Checkpoint, open_checkpoint
from paceline.drafters.head_cache import MOST_BYTES
from paceline.drafters.head_program import HeadProgram, Lender
from paceline.drafters.loading import Host, Outlined, load_model_drafter
from paceline.drafters.memory import Remembering
from paceline.drafters.network import Costs
from paceline.drafters.shortlist import shorten
from paceline.drafters.suitability import Facts, refuse_stranger
from paceline.errors import PacelineError, UsageError
from paceline.models.memory import MemoryNeeds
from paceline.weights import hub

_log = logging.getLogger("paceline")

LOADERS = {
    "eagle": "paceline.drafters.eagle",
    "eagle3": "paceline.drafters.eagle",
    "peagle": "paceline.drafters.eagle",
    "mtp": "paceline.drafters.mtp",
    "dflash": "paceline.drafters.dflash",
    "dspark": "paceline.drafters.dflash",
}
"""By kind: the module whose `load` makes a drafter of a checkpoint."""


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What a user may say about a head besides its path; None leaves it to the checkpoint.

    Attributes:
        layers: whose inputs it reads.
        threads: None means as many as the target has.
        hidden: of MTP heads: whether they read the target's states before ("pre") or after ("post") its final
            norm.
        chain: of MTP heads: the same of the states that they hand on.
        heads: of MTP checkpoints: how many of several heads are used.
        draft_vocab_size: how many ids it drafts, the commonest; see `shortlist`.
        topk: of heads that draft trees: most guesses beside each other.
        sample_from_anchor: of block drafters: whether the anchor's slot of a block predicts too.
    """

    layers: tuple[int, ...] | None = None
    threads: int | None = None
    hidden: str | None = None
    chain: str | None = None
    heads: int | None = None
    sample_from_anchor: bool | None = None
    draft_vocab_size: int | None = None
    topk: int | None = None


Load = Callable[[Checkpoint, Host, HeadOptions], Drafter]


def load_head(
    host: Host, model: str | None = None, *, kind: str | None = None, dtype: str = "auto", **options: Any
) -> Drafter:
    """Load a head, or find it loaded.

    Args:
        model: path of a folder, of a .safetensors or a .gguf file, or org/name; None means the target's own
            files.
        kind: what it has to be; None takes whatever it is.
        dtype: what its matrices become; see `checkpoint.DTYPES`.
        options: see `HeadOptions`.

    Raises:
        UsageError: it is of another kind, or the target has nothing to lend.
        ModelFileError, UnsupportedModelError, ResourceError: it cannot be had, read or run with this target.
    """
    its = HeadOptions(**options)
    key = ("head", model, kind, dtype, its)
    known: Drafter | None = host.models.get(key)
    if known is None:
        path = lender_of(host).lent.file.path if model is None else hub.resolve(model)
        known = host.models[key] = _load(host, path, kind, dtype, its)
    return known


def found_drafter(host: Host) -> Drafter | None:
    """The drafter in the target's own files or beside them, if there is one and it runs.

    The log says which, and why others are not used.
    """
    file = lender_of(host).lent.file
    first = file.path not in host.found
    if first:
        host.found[file.path] = find_drafters(file)
    for one in host.found[file.path]:
        if not one.obstacle:
            try:
                return _load_found(host, one, file.path)
            except PacelineError as error:
                _log.info("%s is not used to draft: %s", one.path, error.message)
        elif first:
            _log.info("%s is not used to draft: %s", one.path, one.obstacle)
    return None


def _load_found(host: Host, one: Found, model: Path) -> Drafter:
    if one.kind == "model":
        drafter: Drafter = load_model_drafter(host, str(one.path), vocabulary="same")
        _log.info("%s, found beside the model, drafts for it", one.path)
        return drafter
    return load_head(host, None if one.path == model else str(one.path), kind=one.kind)


def _load(host: Host, path: Path, kind: str | None, dtype: str, options: HeadOptions) -> Drafter:
    found = open_checkpoint(path, dtype, kind, outline=host.outlines is not None)
    if kind is not None and found.kind != kind:
        raise UsageError(
            f"{path} holds a drafter of kind {found.kind}, not {kind}", f"write {found.kind}:{path}"
        )
    if options.draft_vocab_size is not None:
        lender = lender_of(host)
        refuse_stranger(found, Facts.of(lender), options.layers)
        if found.kind == "mtp" and options.heads is not None:
            found.keep_layers(options.heads)
        shorten(found, lender, options.draft_vocab_size, host.tokenizer.eog_ids)
    load = cast(Load, import_module(LOADERS[found.kind]).load)
    drafter = load(found, host, options)
    for name in found.tensors:  # reading vectors brought in more than these
        found.release(name)
    if host.outlines is not None:
        host.outlines.append(_outlined(found, drafter))
    meaning = replace(options, threads=None)
    host.remind(cast(Remembering, drafter), found.kind, found.identity, meaning)
    _log.info("%s", found.describe())
    return drafter


def _outlined(found: Checkpoint, drafter: Drafter) -> Outlined:
    needs: MemoryNeeds = cast(Any, drafter).network.needs
    waiting = 0 if found.kind in ("dflash", "dspark") else MOST_BYTES  # those file states as they come
    heard = len(cast(HearingDrafter, drafter).layers)
    return Outlined(found.kind, found.path, needs, found.nbytes, heard=heard, most_waiting=waiting)


def lender_of(host: Host) -> Lender:
    """The target, which lends its embedding and its output matrix.

    Raises:
        UsageError: it has none to lend.
    """
    if getattr(host.target, "lent", None) is None:
        raise UsageError("this target lends no weights to a head", "heads draft for models that run here")
    return cast(Lender, host.target)


def costs_of(host: Host, head: HeadProgram) -> Costs:
    """Pass times of a head, measured now."""
    return host.measure(cast(Target, head))  # as much of a target as timing takes
