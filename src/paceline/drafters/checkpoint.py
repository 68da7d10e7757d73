"""Opening a drafter's checkpoint: what kind it is, by its keys and tensors, and its tensors by one name each.

Public checkpoints name the same things differently, and some names promise what the tensors do not hold; so
the tensors decide. Names here are those of llama.cpp's GGUF drafters: `fc`, `blk.N.*`, `output_norm`, `d2t`.
What would run wrongly is refused: a head that reads the wrong layer raises no error, it only drafts badly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core import Floats
from paceline.errors import ModelFileError, UnsupportedModelError, UsageError, suggest
from paceline.weights.folder import open_shards
from paceline.weights.gguf import GGUFFile
from paceline.weights.hf_files import read_optional
from paceline.weights.hf_tensors import LAYER
from paceline.weights.mapping import TensorInfo
from paceline.weights.quantize import quantize
from paceline.weights.quants import Bytes, TensorType, dequantize
from paceline.weights.safetensors import SafetensorsFile

DTYPES: dict[str, TensorType | None] = {
    "auto": TensorType.Q8_0,
    "q8": TensorType.Q8_0,
    "q4": TensorType.Q4_0,
    "bf16": TensorType.BF16,
    "f32": TensorType.F32,
}
"""What matrices become as they are loaded. "auto" leaves what a GGUF file has quantised as it is."""

_FLOATS = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}
_WIDE = (TensorType.F32, TensorType.F16, TensorType.BF16)
_INTEGERS = {"I64": "<i8", "I32": "<i4", "BOOL": "u1", "U8": "u1"}

_LOOKED_UP = ("token_embd.weight", "markov_head.markov_w1.weight")
"""Tables that stay as they are: a look-up reads one row."""

_REFUSED = {
    "peagle": "P-EAGLE heads",
    "dflash2": "DFlash2 drafters",
    "pard2": "PARD-2 drafters",
    "medusa": "Medusa heads",
    "mlp": "MLP speculators",
    "lstm": "Arctic LSTM speculators",
    "model": "complete models",
}
"""Kinds that are recognised and do not run as a head."""

_ANOTHER = "it was made for another model"


@dataclass(frozen=True, slots=True)
class Array:
    """A weight as it lies in the checkpoint.

    Attributes:
        read: returns its bytes.
    """

    type: TensorType
    shape: tuple[int, ...]
    read: Callable[[], Bytes]

    def values(self, start: int = 0, end: int | None = None) -> Floats:
        """The rows from start to end, in float32."""
        raw = self.read().reshape(self.shape[0], -1)[start:end]
        return dequantize(self.type, np.ascontiguousarray(raw).reshape(-1), (len(raw), *self.shape[1:]))


class Checkpoint:
    """An open checkpoint of a head; has of `weights.source.Source` what `models.Tensors` asks for.

    Attributes:
        kind: "eagle3", "eagle", "mtp", "dflash" or "dspark".
        layout: whose way of writing it down.
        settings: config.json with nested parts flattened, or a GGUF file's keys without the architecture.
        tensors: name to shape and the type it has after loading.
        interleaved: rows of query and key are in the order in which rope turns neighbours.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        layout: str,
        settings: dict[str, Any],
        arrays: dict[str, Array],
        indices: dict[str, NDArray[np.int64]],
        dtype: str,
    ) -> None:
        self.path = path
        self.kind = kind
        self.layout = layout
        self.settings = settings
        self.interleaved = False
        self._arrays = arrays
        self._indices = indices
        self._dtype = dtype
        self.tensors = {name: self._info(name, array) for name, array in arrays.items()}

    def has(self, name: str) -> bool:
        return name in self.tensors or name in self._indices

    def add(self, name: str, values: Floats) -> None:
        """Add a tensor that follows from the settings."""
        raw = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
        self._arrays[name] = Array(TensorType.F32, values.shape, lambda: raw)
        self.tensors[name] = self._info(name, self._arrays[name])

    def data(self, name: str) -> Bytes:
        """Bytes of a tensor, rounded to the type that `tensors` says.

        Raises:
            ModelFileError: values that are not finite.
        """
        array, kind = self._arrays[name], self.tensors[name].type
        if kind == array.type:
            return np.ascontiguousarray(array.read())
        if kind in (TensorType.Q8_0, TensorType.Q4_0):
            rows, cols = array.shape
            return quantize(name, rows, cols, array.values, kind)
        values = np.ascontiguousarray(array.values())
        if kind is TensorType.BF16:
            bits = values.view(np.uint32)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return nearest.astype(np.uint16).view(np.uint8).reshape(-1)
        return values.view(np.uint8).reshape(-1)

    def values(self, name: str, start: int = 0, end: int | None = None) -> Floats:
        """Rows of a tensor that is there, in float32 and not rounded."""
        return self._arrays[name].values(start, end)

    def release(self, name: str) -> None:
        """Nothing to do: arrays are views of mapped files."""

    def indices(self, name: str) -> NDArray[np.int64]:
        """A tensor of ids."""
        return self._indices[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that must be there.

        Raises:
            ModelFileError: it is not.
        """
        if name not in self.tensors:
            raise self.fault(f"there is no tensor {name}", "the checkpoint is incomplete; download it again")
        return self.tensors[name].shape

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of these settings that is given."""
        for name in names:
            if self.settings.get(name) is not None:
                return self.settings[name]
        return default

    def keep_layers(self, count: int) -> None:
        """Forget the layers behind the first so many."""
        for name in list(self.tensors):
            match = re.match(r"blk\.(\d+)\.", name)
            if match is not None and int(match[1]) >= count:
                del self.tensors[name]

    def layer_count(self) -> int:
        """Decoder layers of the head."""
        found = {int(match[1]) for name in self.tensors if (match := re.match(r"blk\.(\d+)\.", name))}
        if found != set(range(len(found))) or not found:
            raise self.fault(f"its layers are {sorted(found)}", "they must be numbered from 0 without a gap")
        return len(found)

    def describe(self) -> str:
        """One line for people: what was found."""
        kinds = {info.type.name for info in self.tensors.values() if len(info.shape) == 2}
        count = sum(int(np.prod(info.shape)) for info in self.tensors.values())
        return (
            f"{self.kind} head ({self.layout} layout), {self.layer_count()} layer"
            f"{'s' if self.layer_count() > 1 else ''}, {count / 1e6:.1f} M weights as "
            f"{'/'.join(sorted(kinds)).lower()}: {self.path}"
        )

    def fault(self, what: str, hint: str) -> ModelFileError:
        """What to raise when something about the checkpoint is wrong."""
        return ModelFileError(f"{self.path}: {what}", hint)

    def _info(self, name: str, array: Array) -> TensorInfo:
        kind = self._rounded(name, array)
        elements = int(np.prod(array.shape, dtype=np.int64))
        return TensorInfo(name, array.shape, kind, 0, kind.nbytes(elements))

    def _rounded(self, name: str, array: Array) -> TensorType:
        wanted = DTYPES[self._dtype]
        if len(array.shape) != 2:
            return TensorType.F32
        if name in _LOOKED_UP or (self._dtype == "auto" and array.type not in _WIDE):
            return array.type
        assert wanted is not None
        if array.shape[1] % wanted.block_size:
            return TensorType.F32
        if wanted is TensorType.Q4_0 and name == "output.weight":
            return TensorType.Q8_0
        return wanted


def open_checkpoint(path: str | Path, dtype: str = "auto", kind: str | None = None) -> Checkpoint:
    """Open a folder of safetensors, one safetensors file with its config.json beside it, or a GGUF file.

    Args:
        dtype: a key of `DTYPES`.
        kind: what is looked for, for errors.

    Raises:
        UsageError: there is no such dtype.
        ModelFileError: the checkpoint cannot be read, or is incomplete.
        UnsupportedModelError: it is of a kind that does not run here, by name.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype of a drafter is {dtype!r}", suggest(str(dtype), list(DTYPES)))
    path = Path(path)
    if path.suffix == ".gguf":
        return _open_gguf(path, dtype, kind)
    if path.is_dir():
        shards, folder = open_shards(path), path
    else:
        shards, folder = [SafetensorsFile(path)], path.parent
    settings = flatten(read_optional(folder / "config.json"))
    arrays, indices = _arrays(shards)
    shapes = {name: array.shape for name, array in arrays.items()}
    its = recognise(settings, shapes)
    _refuse_kind(path, its, kind)
    layout = _layout(settings, shapes, its)
    named, left = _renamed(arrays, its, settings)
    if left and its != "mtp":
        shown = ", ".join(map(repr, left[:3])) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        raise UnsupportedModelError(
            f"{path}: a drafter of kind {its} with tensors that are not known here: {shown}",
            "without them it would draft badly; update Paceline or use another checkpoint",
        )
    return Checkpoint(path, its, layout, settings, named, indices, dtype)


def _complete(path: Path, wanted: str | None) -> UnsupportedModelError:
    """What to raise for a model without a head."""
    hint = "leave mtp out, or give another file" if wanted == "mtp" else f"give it as model:{path}"
    return UnsupportedModelError(f"{path} holds a complete model and no head that drafts for one", hint)


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the decoder's own settings on the outer level."""
    found = dict(settings)
    for name in ("transformer_layer_config", "text_config"):
        inner = found.pop(name, None)
        if isinstance(inner, Mapping):
            found = {**inner, **found}
    return found


def recognise(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The kind of a checkpoint, by what it holds rather than by what it is called.

    Returns:
        "eagle3", "eagle", "mtp", "dflash", "dspark", a key of the kinds that are refused, or "" if unknown.
    """
    named = str(settings.get("speculators_model_type") or "")
    if named:
        return named
    made = " ".join(map(str, settings.get("architectures") or ()))
    for name in ("DFlash2", "PEagle", "DSpark", "DFlash"):
        if name in made:
            return name.lower()
    if any(name.startswith("markov") or ".markov" in name for name in shapes):
        return "dspark"
    if "mask_hidden" in shapes:
        return "peagle"
    fuse = shapes.get("fc.weight")
    if fuse is not None and len(fuse) == 2:
        return _fused(settings, shapes, fuse)
    if any(_mtp_place(name, settings) for name in shapes):
        return "mtp"
    for pattern, kind in _BY_NAME.items():
        if any(re.match(pattern, name) for name in shapes):
            return kind
    return ""


_BY_NAME = {
    r"medusa_|medusa_lm_head\.|\d+\.\d+\.linear\.weight|blocks\.": "medusa",
    r"emb\.0|speculator\.emb\.": "mlp",
    r"forget_emb\.0": "lstm",
    r"model\.layers\.0\.": "model",
}


def _fused(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], fuse: tuple[int, ...]) -> str:
    """Tell apart heads that have a matrix `fc`."""
    width = fuse[0]
    for first in ("midlayer", "layers.0"):
        query = shapes.get(f"{first}.self_attn.q_proj.weight")
        if query is not None and query[1] == 2 * width:
            return "eagle3"
    if "hidden_norm.weight" in shapes and "layers.0.input_layernorm.weight" in shapes:
        return "dflash"
    if fuse[1] == 2 * width and "layers.0.input_layernorm.weight" not in shapes:
        return "eagle"
    return "eagle3" if settings.get("draft_vocab_size") else ""


def _refuse_kind(path: Path, kind: str, wanted: str | None) -> None:
    if kind in KINDS:
        return
    if kind == "model":
        raise _complete(path, wanted)
    what = _REFUSED.get(kind, f"drafters of kind {kind!r}" if kind else "")
    if not what:
        raise UnsupportedModelError(
            f"{path} is no drafter that is known here, by its keys and tensors",
            f"what runs: {', '.join(KINDS)}, and complete models as model:PATH",
        )
    raise UnsupportedModelError(f"{path}: {what} do not run here yet", f"what runs: {', '.join(KINDS)}")


def _layout(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], kind: str) -> str:
    made = " ".join(map(str, settings.get("architectures") or ()))
    if settings.get("speculators_model_type"):
        return "speculators"
    if kind in ("dflash", "dspark"):
        return "z-lab" if settings.get("dflash_config") or kind == "dflash" else "DeepSpec"
    if kind == "mtp":
        return next((found[0] for name in shapes if (found := _mtp_place(name, settings))), "MTP")
    if "eagle_config" in settings or "ForCausalLMEagle3" in made:
        return "SpecForge"
    if "target_layer_ids" in settings:
        return "DeepSpec" if kind in ("eagle3", "dspark") else "z-lab"
    return "vLLM" if kind == "eagle3" and "midlayer.self_attn.q_proj.weight" not in shapes else "SafeAILab"


_OUTER = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "hidden_norm.weight": "hidden_norm.weight",
    "d2t": "d2t",
    "draft_id_to_target_id": "d2t",
}
_LAYER = {**LAYER, "hidden_norm": "attn_norm_2"}
_SKIPPED = re.compile(r"t2d|.*rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")
_IN_LAYER = re.compile(r"(?:layers\.(\d+)|midlayer)\.([\w.]+)\.(weight|bias)")
_CHAIN = re.compile(
    r"(?:markov_head\.(?:markov_w1|markov_w2|gate_proj|joint_proj)|confidence_head\.proj)\.(?:weight|bias)"
)
_FC_NORM = re.compile(r"fc_norm\.(\d)\.weight")


def plain_name(name: str) -> str | None:
    """The name here of a tensor of EAGLE, EAGLE-3 and DFlash checkpoints; "" for one not needed."""
    name = name.removeprefix("model.").removeprefix("logit_head.")
    if name in _OUTER:
        return _OUTER[name]
    if _SKIPPED.fullmatch(name):
        return ""
    if _FC_NORM.fullmatch(name) or _CHAIN.fullmatch(name):
        return name
    match = _IN_LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return None
    return f"blk.{int(match[1] or 0)}.{_LAYER[match[2]]}.{match[3]}"


_NEXTN = {
    "eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head", "embed_tokens": "embed_tokens",
    "input_proj": "eh_proj", "token_layernorm": "enorm", "hidden_layernorm": "hnorm",
    "final_layernorm": "shared_head_norm",
}  # fmt: skip
_QWEN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}
_MTP = (
    ("Qwen", re.compile(r"mtp\.(?:layers\.(\d+)\.)?([\w.]+)\.(weight|bias)")),
    ("MiMo", re.compile(r"model\.mtp_layers\.(\d+)\.([\w.]+)\.(weight|bias)")),
    ("speculators", re.compile(r"mtp_layers\.(\d+)\.([\w.]+)\.(weight|bias)")),
    ("MiMo V2", re.compile(r"model\.mtp\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")),
    ("DeepSeek", re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")),
)


def _mtp_place(name: str, settings: Mapping[str, Any]) -> tuple[str, int, str, str] | None:
    """(layout, head, name within the layer, "weight" or "bias") of a tensor of an MTP head."""
    for layout, pattern in _MTP:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        index = int(match[1] or 0)
        if layout == "DeepSeek":
            index -= int(settings.get("num_hidden_layers") or 0)
            if index < 0 or not settings.get("num_hidden_layers"):
                return None
        return layout, index, match[2], match[3]
    return None


def _mtp_name(name: str, settings: Mapping[str, Any]) -> str | None:
    place = _mtp_place(name, settings)
    if place is None:
        return None
    layout, index, part, kind = place
    if layout == "Qwen" and part in _QWEN and not name.startswith("mtp.layers"):
        return f"blk.0.nextn.{_QWEN[part]}.{kind}"
    if part in _NEXTN:
        return f"blk.{index}.nextn.{_NEXTN[part]}.{kind}"
    return f"blk.{index}.{LAYER.get(part, part)}.{kind}"


Rename = Callable[[str, Mapping[str, Any]], str | None]

KINDS: dict[str, Rename] = {
    "eagle3": lambda name, _: plain_name(name),
    "eagle": lambda name, _: plain_name(name),
    "mtp": _mtp_name,
    "dflash": lambda name, _: plain_name(name),
    "dspark": lambda name, _: plain_name(name),
}
"""Kinds that run, and how the names of their tensors are read; None for a name that is not known."""


def _renamed(
    arrays: Mapping[str, Array], kind: str, settings: Mapping[str, Any]
) -> tuple[dict[str, Array], list[str]]:
    """Arrays by the names here, and the names that mean nothing."""
    named: dict[str, Array] = {}
    left: list[str] = []
    for name, array in arrays.items():
        ours = KINDS[kind](name, settings)
        if ours is None:
            left.append(name)
        elif ours:
            named[ours] = array
    return named, left


def _arrays(shards: Sequence[SafetensorsFile]) -> tuple[dict[str, Array], dict[str, NDArray[np.int64]]]:
    """Weights, and ids, of all files. What is neither is left to whoever needs it."""
    arrays: dict[str, Array] = {}
    indices: dict[str, NDArray[np.int64]] = {}
    for shard in shards:
        for name, entry in shard.entries.items():
            if entry.dtype in _FLOATS and entry.shape and 0 not in entry.shape:
                arrays[name] = Array(_FLOATS[entry.dtype], entry.shape, _reader(shard, name))
            elif entry.dtype in _INTEGERS:
                raw = shard.data(name).view(_INTEGERS[entry.dtype]).astype(np.int64).reshape(entry.shape)
                indices[plain_name(name) or name] = raw
    return arrays, indices


def _reader(shard: SafetensorsFile, name: str) -> Callable[[], Bytes]:
    return lambda: shard.data(name)


def _open_gguf(path: Path, dtype: str, wanted: str | None) -> Checkpoint:
    file = GGUFFile.open(path, indices=True)
    family = str(file.metadata.get("general.architecture", ""))
    settings = {
        key.removeprefix(family + "."): value
        for key, value in file.metadata.items()
        if key.startswith(family + ".")
    }
    arrays = {
        name: Array(info.type, info.shape, _gguf_reader(file, name)) for name, info in file.tensors.items()
    }
    kind = family if family in ("eagle3", "dflash", "dspark") else ""
    if settings.get("nextn_predict_layers"):
        kind, arrays = "mtp", _nextn(arrays, settings)
    if not kind:
        raise _complete(path, wanted)
    found = Checkpoint(path, kind, "GGUF", settings, arrays, file.indices(), dtype)
    found.interleaved = family in ("eagle3", "llama")
    return found


def _gguf_reader(file: GGUFFile, name: str) -> Callable[[], Bytes]:
    return lambda: file.data(name)


def _nextn(arrays: Mapping[str, Array], settings: Mapping[str, Any]) -> dict[str, Array]:
    """The blocks of a model's GGUF file that are heads, numbered from 0."""
    first = int(settings.get("block_count") or 0) - int(settings["nextn_predict_layers"])
    found = {}
    for name, array in arrays.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if match is not None and int(match[1]) >= first:
            found[f"blk.{int(match[1]) - first}.{match[2]}"] = array
    return found


def target_ids(found: Checkpoint, rows: int, vocab: int) -> NDArray[np.int64] | None:
    """[rows] the target's id of each id that a head drafts; None where they are the same.

    Args:
        rows: of the head's output matrix.
        vocab: of the target.

    Raises:
        ModelFileError: there is no map where one is needed, or it makes no sense.
    """
    if not found.has("d2t"):
        if rows != vocab:
            raise found.fault(
                f"its output has {rows} ids, the target {vocab}, and there is no d2t that maps them", _ANOTHER
            )
        return None
    raw = found.indices("d2t").reshape(-1)
    if len(raw) != rows:
        raise found.fault(f"d2t has {len(raw)} ids, the output {rows}", "the checkpoint is damaged")
    kept = found.indices("t2d").reshape(-1) if found.has("t2d") else np.ones(vocab, np.int64)
    if len(kept) != vocab:
        raise found.fault(f"t2d has {len(kept)} ids, the target {vocab}", _ANOTHER)
    offsets, absolute = raw + np.arange(rows), raw
    ids, other = (absolute, offsets) if found.layout == "GGUF" else (offsets, absolute)
    if _are_ids(ids, kept):
        return None if rows == vocab else ids
    if _are_ids(other, kept):
        customary, given = ("ids", "offsets") if found.layout == "GGUF" else ("offsets", "ids")
        raise found.fault(f"d2t holds {given} where {customary} are customary", "convert it again")
    if ids.max() >= vocab:
        raise found.fault(f"d2t leads to id {int(ids.max())}, the target has {vocab}", _ANOTHER)
    raise found.fault("d2t does not lead to ascending ids of the target", "the checkpoint is damaged")


def _are_ids(ids: NDArray[np.int64], kept: NDArray[np.int64]) -> bool:
    """Whether these ascend within the vocabulary and are those that `kept` marks."""
    inside = len(ids) > 0 and ids[0] >= 0 and ids[-1] < len(kept)
    return bool(inside and (np.diff(ids) > 0).all() and kept[ids].all())


def layer_ids(found: Checkpoint, layers: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads, in its order, by the conventions of its layout.

    Args:
        layers: of the target.

    Raises:
        ModelFileError: the checkpoint does not say, or names layers that the target does not have.
    """
    ids, shift = _declared(found, layers)
    if (
        not isinstance(ids, Sequence)
        or isinstance(ids, str)
        or not ids
        or any(type(i) is not int for i in ids)
    ):
        raise found.fault(f"the layers it reads are {str(ids)[:60]}", "they must be a list of whole numbers")
    taps = tuple(i + shift for i in ids)
    if list(taps) != sorted(set(taps)):
        raise found.fault(f"the layers it reads, {list(ids)}, do not ascend", "the checkpoint is damaged")
    if taps[0] < 0 or taps[-1] > layers:
        raise found.fault(f"it reads layers {list(ids)} of a target that has {layers}", _ANOTHER)
    return taps


def _declared(found: Checkpoint, layers: int) -> tuple[Any, int]:
    """(ids, what must be added so that they name inputs of layers)"""
    nested = found.settings.get("eagle_config")
    if isinstance(nested, Mapping) and nested.get("eagle_aux_hidden_state_layer_ids"):
        return nested["eagle_aux_hidden_state_layer_ids"], 1
    for name, shift in _ID_KEYS:
        if found.settings.get(name) is not None:
            return found.settings[name], shift
    if found.layout in ("SafeAILab", "SpecForge") and found.kind == "eagle3" and layers >= 6:
        return [2, layers // 2, layers - 3], 0  # fixed in their code, which writes no key
    raise found.fault(
        "it does not say which layers of the target it reads",
        "set eagle_aux_hidden_state_layer_ids in its config.json, or give layers=2-12-21",
    )


_ID_KEYS = (
    ("eagle_aux_hidden_state_layer_ids", 0),
    ("aux_hidden_state_layer_ids", 0),
    ("target_layers", 0),
    ("target_layer_ids", 1),
    ("dspark_target_layer_ids", 1),
)
