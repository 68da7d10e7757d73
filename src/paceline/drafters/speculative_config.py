"""vLLM's `speculative_config`, in this engine's words.

Methods have other names there, some settings follow from others, and some have no counterpart: those that
say how something is computed are left out with a line in the log, those that would change what happens are
refused. What is not vLLM's passes through, so that this engine's own options may stand beside its.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from paceline.errors import UsageError

_log = logging.getLogger("paceline")

_UNNEEDED = {
    "draft_tensor_parallel_size", "tensor_parallel_size", "enforce_eager", "code_revision", "kv_cache_dtype",
    "disable_padded_drafter_batch", "use_local_argmax_reduction", "moe_backend", "attention_backend",
    "draft_load_config", "draft_sample_method", "allow_draft_model_vocab_padding", "disable_logprobs",
    "disable_by_batch_size", "speculative_disable_by_batch_size", "num_speculative_tokens_per_batch_size",
    "suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
}  # fmt: skip
"""Settings of another engine's ways: this one decides by prices, and the texts are the same."""

_REFUSED = {
    "quantization": "give dtype for a head, quantize for a draft model",
    "speculative_token_tree": "leave it out: trees grow as far as they pay",
    "rejection_sample_method": "leave it out; sampling parameters have verification",
    "synthetic_acceptance_rates": "leave it out: drafts are checked by the model",
    "synthetic_acceptance_length": "leave it out: drafts are checked by the model",
    "acceptance_method": "leave it out; sampling parameters have verification",
}
"""Settings that would change what is asked for, and what to do instead."""

_ALLOWED = {"rejection_sample_method": ("standard", "rejection_sampler")}
"""Values of those that mean what happens anyway."""

OTHERS = {
    "medusa": "Medusa heads",
    "mlp-speculator": "MLP speculators",
    "arctic": "Arctic LSTM speculators",
    "extract-hidden-states": "a method that only writes hidden states down",
    "custom-class": "drafters of the caller's own",
}
"""Methods of vLLM that do not run here."""


_A_HEAD = re.compile(r"eagle|mtp|nextn|dflash|dspark")


def translate(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(method, options) of a mapping in vLLM's words, or this engine's.

    Without a method it is "any": whatever is at `model`.

    Raises:
        UsageError: it says neither method nor model, or asks for what is not done here.
    """
    options = {key: value for key, value in config.items() if value is not None}
    method = options.pop("method", _method_of(options))
    if not isinstance(method, str):
        raise UsageError(f"method of a drafter is {method!r}", 'write {"method": "ngram"}, or name a model')
    for key in [key for key in options if key in _REFUSED]:
        if options[key] not in _ALLOWED.get(key, ()):
            raise UsageError(f"{key} is {options[key]!r}, which does not apply here", _REFUSED[key])
        del options[key]
    for key in [key for key in options if key in _UNNEEDED]:
        _log.info("%s has no meaning here and is left out", key)
        del options[key]
    method = _parallel(method, options)
    _suffix(options)
    _vocabulary(method, options)
    _revision(options)
    return method, options


def _method_of(options: dict[str, Any]) -> str | None:
    """The method where none is given: a model tells it, as does the name of a look-up in its place."""
    model = options.get("model", options.get("draft_model"))
    if isinstance(model, str) and (look_up := model.strip("[]")) in ("ngram", "suffix"):
        del options["model" if "model" in options else "draft_model"]
        return look_up
    return None if model is None else "any"


def _parallel(method: str, options: dict[str, Any]) -> str:
    """P-EAGLE is EAGLE-3 with a flag there."""
    flag = options.pop("parallel_drafting", False)
    if not isinstance(flag, bool):
        raise UsageError(f"parallel_drafting is {flag!r}", "give true or false")
    if not flag or method.lower() in ("peagle", "dflash", "dspark"):
        return method
    if method.lower() in ("eagle", "eagle3"):
        return "peagle"
    raise UsageError(
        f"parallel_drafting does not go with {method!r}", "it is for P-EAGLE heads: method eagle3"
    )


def _suffix(options: dict[str, Any]) -> None:
    """No cached requests means no responses to draft from; another number has no counterpart."""
    if (count := options.pop("suffix_decoding_max_cached_requests", None)) is not None:
        if count == 0:
            options.setdefault("max_tokens", 0)
        else:
            _log.info("suffix_decoding_max_cached_requests is left out; max_tokens bounds what is kept")


def _vocabulary(method: str, options: dict[str, Any]) -> None:
    """Vocabularies may differ here without being asked; a limit on text only a draft model has."""
    flag = options.pop("use_heterogeneous_vocab", None)
    if flag is not None and not isinstance(flag, bool):
        raise UsageError(f"use_heterogeneous_vocab is {flag!r}", "give true or false")
    if "max_model_len" in options and _A_HEAD.search(method.lower()):
        _log.info("max_model_len of a drafter is left out: a head follows as far as its target")
        del options["max_model_len"]


def _revision(options: dict[str, Any]) -> None:
    if (revision := options.pop("revision", None)) is not None:
        name, model = ("model" if "model" in options else "draft_model"), options.get("model")
        if (
            not isinstance(options.get(name), str)
            or "@" in str(options[name])
            or str(options[name]).count("/") != 1
        ):
            raise UsageError(
                f"revision is {revision!r}, of {model!r}", "it goes with a model on the hub, org/name"
            )
        repo, colon, quant = str(options[name]).partition(":")
        options[name] = f"{repo}@{revision}{colon}{quant}"
