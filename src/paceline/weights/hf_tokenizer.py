"""The tokenizer, chat template and sampling defaults of a Hugging Face folder, under GGUF's keys.

tokenizer.json itself is passed on, parsed, under the key that the GGUF specification has for it; how it cuts
text is the business of the `tokenizers` library. What it says of single tokens is read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.weights.hf_files import DOWNLOAD, read_json, read_optional, read_text

JSON_KEY = "tokenizer.huggingface.json"
MODEL = "tokenizer.json"
"""`tokenizer.ggml.model` of such a vocabulary; no GGUF file has it."""

_GGML = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # GGUF's token types
_BYTE_TEXT = re.compile(r"<0x[0-9A-F]{2}>")
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def translate(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of everything in a folder that has to do with text.

    Args:
        settings: config.json, which gives the size of the vocabulary.

    Raises:
        ModelFileError: a file is missing, damaged, or contradicts another.
        UnsupportedModelError: a kind of tokenizer that is not known.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ModelFileError(
            f"{folder} has no tokenizer.json",
            "load its tokenizer with transformers and save it there, or use a GGUF file",
        )
    tokenizer = read_json(folder / "tokenizer.json")
    config = read_optional(folder / "tokenizer_config.json")
    generation = read_optional(folder / "generation_config.json")
    vocabulary = _vocabulary(tokenizer, int(settings["vocab_size"]))
    tokens: list[str] = vocabulary[_GGML + "tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    found = {JSON_KEY: tokenizer, _GGML + "model": MODEL, **vocabulary}
    found |= _roles(config, settings, ids)
    found |= _wrapping(tokenizer, found)
    found[_GGML + "add_space_prefix"] = any(map(_strips, _steps(tokenizer.get("decoder"), "decoders")))
    found["tokenizer.huggingface.eos_token_ids"] = _ends(settings, generation, len(tokens))
    return found | _templates(folder, config) | _sampling(generation)


def _vocabulary(tokenizer: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Texts and kinds of all ids; ids that the tokenizer leaves out are named as converters name them."""
    model = tokenizer.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, Mapping) else model
        raise UnsupportedModelError(f"a tokenizer.json of type {str(kind)[:40]!r}", "only BPE runs here")
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, Mapping) or not vocabulary:
        raise ModelFileError("tokenizer.json has no vocabulary", DOWNLOAD)
    for text, i in vocabulary.items():
        if type(i) is not int or not 0 <= i < size:
            raise ModelFileError(
                f"tokenizer.json gives {text[:40]!r} the id {str(i)[:20]}; config.json has {size} tokens",
                DOWNLOAD,
            )
        if kinds[i] != _UNUSED:
            raise ModelFileError(f"tokenizer.json has two tokens of id {i}: {text[:40]!r}", DOWNLOAD)
        tokens[i] = text
        kinds[i] = _BYTE if model.get("byte_fallback") and _BYTE_TEXT.fullmatch(text) else _NORMAL
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown in vocabulary:
        kinds[vocabulary[unknown]] = _UNKNOWN
    strips: dict[str, list[int]] = {"lstrip": [], "rstrip": []}
    for token in _added(tokenizer, size):
        tokens[token["id"]] = token["content"]
        if kinds[token["id"]] != _UNKNOWN:
            kinds[token["id"]] = _CONTROL if token.get("special") else _USER_DEFINED
        for side, where in strips.items():
            if token.get(side):
                where.append(token["id"])
    sides = {f"tokenizer.huggingface.{side}": where for side, where in strips.items()}
    return {_GGML + "tokens": tokens, _GGML + "token_type": kinds, **sides}


def _added(tokenizer: Mapping[str, Any], size: int) -> Iterator[Mapping[str, Any]]:
    """The added tokens that the model has a row for: some folders add one for images to a text model."""
    added = tokenizer.get("added_tokens") or []
    for token in added if isinstance(added, list) else [added]:
        if (
            not isinstance(token, Mapping)
            or type(token.get("id")) is not int
            or token["id"] < 0
            or not isinstance(token.get("content"), str)
        ):
            raise ModelFileError(f"tokenizer.json adds {str(token)[:60]}, which is no token", DOWNLOAD)
        if token.get("single_word"):
            raise UnsupportedModelError(
                f"tokenizer.json adds {token['content']!r} for whole words only", "that does not run here"
            )
        if token["id"] < size:
            yield token


def _roles(config: Mapping[str, Any], settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Ids of the tokens with a role, by their text in tokenizer_config.json or their id in config.json."""
    found = {}
    for name, role in _ROLES.items():
        token = config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        number = settings.get(f"{name}_token_id")
        if isinstance(text, str) and text in ids:
            found[f"{_GGML}{role}_token_id"] = ids[text]
        elif text is None and type(number) is int and 0 <= number < len(ids):
            found[f"{_GGML}{role}_token_id"] = number
    return found


def _wrapping(tokenizer: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the post-processor puts BOS before and EOS after a text."""
    before: list[Any] = []
    after: list[Any] = []
    for step in _steps(tokenizer.get("post_processor"), "processors"):
        if step.get("type") != "TemplateProcessing":
            continue
        tokens = _object(step.get("special_tokens"))
        side = before
        for piece in _objects(step.get("single")):
            if "Sequence" in piece:
                side = after
            else:
                name = str(_object(piece.get("SpecialToken")).get("id"))
                ids = _object(tokens.get(name)).get("ids")
                side += ids if isinstance(ids, list) else [name]
    for added, role in ((before, "bos"), (after, "eos")):
        if added not in ([], [found.get(f"{_GGML}{role}_token_id")]):
            raise UnsupportedModelError(
                f"tokenizer.json wraps texts in the tokens {before} and {after}",
                "only BOS and EOS are put there",
            )
    return {_GGML + "add_bos_token": bool(before), _GGML + "add_eos_token": bool(after)}


def _strips(decoder: Mapping[str, Any]) -> bool:
    """Whether this step of decoding drops the space before a text."""
    if decoder.get("type") == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return decoder.get("type") == "Strip" and bool(decoder.get("start"))


def _steps(part: Any, name: str) -> list[Mapping[str, Any]]:
    """The parts of a `Sequence`, or the part itself."""
    return _objects(part.get(name) if _object(part).get("type") == "Sequence" else [part])


def _object(value: Any) -> Mapping[str, Any]:
    """A JSON object as it is; anything else as an empty one, which the library will refuse by itself."""
    return value if isinstance(value, Mapping) else {}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _ends(settings: Mapping[str, Any], generation: Mapping[str, Any], size: int) -> list[int]:
    """Ids that end a generation, by generation_config.json and config.json."""
    found: set[int] = set()
    for where in (generation, settings):
        given = where.get("eos_token_id")
        for token in given if isinstance(given, list) else [given]:
            if token is not None and type(token) is not int:
                raise ModelFileError(f"eos_token_id is {str(given)[:60]}", DOWNLOAD)
            if token is not None and 0 <= token < size:  # defaults may lie outside a small vocabulary
                found.add(token)
    return sorted(found)


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat template, and one for tools: in files of their own, or in tokenizer_config.json."""
    given = config.get("chat_template")
    if given is None and (folder / "chat_template.json").is_file():
        given = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(given, list):
        given = {t.get("name"): t.get("template") for t in given if isinstance(t, Mapping)}
    named: dict[Any, Any] = dict(given) if isinstance(given, Mapping) else {"default": given}
    for name, path in (
        ("default", folder / "chat_template.jinja"),
        ("tool_use", folder / "additional_chat_templates" / "tool_use.jinja"),
    ):
        if path.is_file():
            named[name] = read_text(path)
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    return {key: named[name] for name, key in keys.items() if named.get(name) is not None}


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's authors sample with, where they say; `do_sample` false means greedy."""
    if generation.get("do_sample") is False:
        return {"general.sampling.temp": 0.0}
    found = {}
    for name, theirs in _SAMPLING.items():
        value = generation.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelFileError(f"generation_config.json has {name} = {str(value)[:40]}", DOWNLOAD)
        found[f"general.sampling.{theirs}"] = value
    return found
