"""Heads that draft token by token, EAGLE and MTP, run by public code; see public_code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from oracles.public_code import (
    SOURCES,
    Absent,
    PublicTarget,
    Tap,
    TextByText,
    bypass,
    leave_out,
    loaded,
    mapped,
    qwen3,
    reach_deepspec,
    round_of,
    row,
    settings_of,
    speculator,
    weights_of,
    write,
)
from support.public_rounds import Round


class SafeAILab(TextByText):
    """EAGLE-1 by its authors: eagle-llm."""

    def __init__(self, path: Path, target: PublicTarget) -> None:
        from eagle.model.cnets import Model
        from eagle.model.configs import EConfig

        config = EConfig.from_pretrained(str(path))
        config.rope_scaling = None  # which later versions of transformers fill in
        self.model = loaded(Model(config, bias=bool(settings_of(path).get("bias", True))), path, target)
        self.target, self.path = target, path
        self.tap = Tap(target.head)

    def save(self, path: Path) -> None:
        write(path, self.model.state_dict(), settings_of(self.path))

    def _draft(self, text: Sequence[int], count: int) -> Round:
        features = self.target.states(text[:-1])[-1]
        self.tap.take()
        ids = self.model.generate(features, row(text), self.target.head, max_length=count, use_cache=True)
        return round_of(text, ids[len(text) :], [rows[-1] for rows in self.tap.take()])


class AngelSlim:
    """EAGLE-3 with SafeAILab's way of drafting, trees cut to one branch: angelslim."""

    package = "angelslim.compressor.speculative.inference.models.eagle3"

    def __init__(self, path: Path, target: PublicTarget) -> None:
        self.target, self.path = target, path
        self.model = loaded(self._model(settings_of(path)), path, target)
        self.model.top_k = 1
        self.model.init_tree()
        if self.model.config.draft_vocab_size == self.model.config.vocab_size:
            del self.model.d2t, self.model.t2d  # as it does itself once it has loaded a head
        self.tap = Tap(self.model.lm_head)

    def play(self, texts: Sequence[Sequence[int]], count: int) -> list[Round]:
        self.model.reset_kv()
        self.model.depth, self.model.total_tokens = count - 1, count
        return [self._draft(text) for text in texts]

    def save(self, path: Path) -> None:
        write(path, self.model.state_dict(), settings_of(self.path))

    def _model(self, settings: Mapping[str, Any]) -> Any:
        bypass(self.package)
        from angelslim.compressor.speculative.inference.models.eagle3.draft import Llama3Eagle3Drafter

        return Llama3Eagle3Drafter(_bag(settings))

    def _draft(self, text: Sequence[int]) -> Round:
        # The three layers are fixed in the code of the targets: hidden states 2, N / 2 and N - 3.
        layers = self.target.model.config.num_hidden_layers
        states = self.target.states(text[:-1])
        known = 0 if self.model.stable_kv is None else self.model.stable_kv[0][0].shape[2]
        features = torch.cat([states[i][:, known:] for i in (2, layers // 2, layers - 3)], dim=-1)
        drafts = self._generate(features, row(text))
        return round_of(text, drafts[0, 1:], [rows[-1] for rows in self.tap.take()])

    def _generate(self, features: Any, ids: Any) -> Any:
        with torch.inference_mode():
            return self.model.topK_genrate(features, ids)[0]


def _bag(settings: Mapping[str, Any]) -> SimpleNamespace:
    """A configuration as old code asks for it: by attributes, absent where not given."""
    wanted = {"rope_scaling": None, "pad_token_id": None, "pretraining_tp": 1, "hidden_act": "silu"}
    return SimpleNamespace(**{**wanted, **settings})


class SafeAILabSource(AngelSlim):
    """EAGLE-3 by its authors, from their repository: no package has it."""

    def _model(self, settings: Mapping[str, Any]) -> Any:
        spec = importlib.util.spec_from_file_location("cnets", SOURCES / "EAGLE/eagle/model/cnets.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(SOURCES / "EAGLE/eagle/model"))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.pop(0)
        return module.Model(_bag(settings))

    def _generate(self, features: Any, ids: Any) -> Any:
        with torch.inference_mode():
            return self.model.topK_genrate(features, ids, None, None)[0]


class SpecForge(TextByText):
    """EAGLE-3 as specforge trains it: each step sees the text's keys and its own row's."""

    def __init__(self, path: Path, target: PublicTarget) -> None:
        from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

        config = AutoDraftModelConfig.from_file(str(path / "config.json"))
        self.model = loaded(AutoDraftModel.from_config(config), path, target)
        self.target = target
        # Its configurations count the layers' outputs.
        self.taps = [i + 1 for i in config.eagle_config["eagle_aux_hidden_state_layer_ids"]]

    @torch.inference_mode()
    def _draft(self, text: Sequence[int], count: int) -> Round:
        states, model = self.target.states(text[:-1]), self.model
        hidden = model.project_hidden_states(torch.cat([states[tap] for tap in self.taps], dim=-1))
        ids, length = row(text[1:]), len(text) - 1
        seen = torch.ones((1, length), dtype=torch.bool)
        mask = model.prepare_decoder_attention_mask(seen, hidden, 1, length, 0)
        cache: list[list[Any]] = [[], []]
        drafts, logits = [], []
        for _ in range(count):
            hidden = model.backbone(
                input_embeds=model.embed_input_ids(ids),
                hidden_states=hidden,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(length)[None],
            )
            logits.append(model.compute_logits(hidden)[0, -1])
            drafts.append(mapped(model, int(logits[-1].argmax())))
            ids = torch.cat([ids[:, 1:], row(drafts[-1:])], dim=1)
        return round_of(text, drafts, logits)


class Speculators(TextByText):
    """EAGLE-3 as speculators trains it, asked again with each drafted token taught."""

    def __init__(self, path: Path, target: PublicTarget) -> None:
        self.model = speculator(path, target)
        self.target = target
        self.tap = Tap(self.model.lm_head)

    @torch.inference_mode()
    def _draft(self, text: Sequence[int], count: int) -> Round:
        states = self.target.states(text[:-1])
        given = torch.cat([states[i] for i in self.model.target_layer_ids], dim=-1)
        drafts: list[int] = []
        logits = []
        for step in range(1, count + 1):
            ids = row([*text[1:], *drafts])
            behind = given.new_zeros(1, ids.shape[1] - given.shape[1], given.shape[2])
            self.tap.take()
            self.model(
                hidden_states=torch.cat([given, behind], dim=1),
                input_ids=ids,
                document_ids=torch.zeros_like(ids),
                ttt_steps=step,
            )
            logits.append(self.tap.take()[-1][given.shape[1] - 1])
            drafts.append(mapped(self.model, int(logits[-1].argmax())))
        return round_of(text, drafts, logits)


class SpeculatorsParallel(Speculators):
    """P-EAGLE as speculators trains it, with the one group of masks that stands behind the text."""

    @torch.inference_mode()
    def _draft(self, text: Sequence[int], count: int) -> Round:
        module = importlib.import_module(type(self.model).__module__)
        states = self.target.states(text[:-1])
        known = torch.cat([states[i] for i in self.model.target_layer_ids], dim=-1)
        behind = count - 1  # positions that a training text would have
        given = torch.cat([known, known.new_zeros(1, behind, known.shape[2])], dim=1)
        tokens = row([*text[1:], *[0] * behind])
        group = _group(known.shape[1], count)
        self.tap.take()
        with (
            mock.patch.object(module, "generate_cod_sample_indices", return_value=group),
            mock.patch.object(module, "compute_metrics", return_value=(None, {})),
        ):
            self.model(
                hidden_states=given,
                input_ids=tokens,
                document_ids=torch.zeros_like(tokens),
                verifier_last_hidden_states=given.new_zeros(1, tokens.shape[1], self.model.hidden_size),
            )
        logits = self.tap.take()[0][known.shape[1] - 1 :]
        return round_of(text, [mapped(self.model, int(its.argmax())) for its in logits], logits)


def _group(known: int, count: int) -> tuple[Any, Any]:
    """Anchor and depth of each row: the text's own, and masks behind the last."""
    anchors = torch.tensor([*range(known), *[known - 1] * (count - 1)])
    return anchors, torch.tensor([*[0] * known, *range(1, count)])


class SpecForgeParallel(SpecForge):
    """P-EAGLE as specforge trains it, with the one group of masks that stands behind the text."""

    @torch.inference_mode()
    def _draft(self, text: Sequence[int], count: int) -> Round:
        with mock.patch.dict(sys.modules, {name: Absent(name) for name in ("triton", "triton.language")}):
            from specforge.algorithms.peagle.model import create_peagle_mask_mod
        from torch.nn.attention.flex_attention import create_block_mask

        states, model = self.target.states(text[:-1]), self.model
        known = torch.cat([states[tap] for tap in self.taps], dim=-1)
        masks = model.mask_hidden.expand(1, count - 1, -1)
        anchors, depths = _group(known.shape[1], count)
        length = len(anchors)
        seen = create_peagle_mask_mod(anchors, depths, torch.tensor([length]), length)
        made = model.backbone(
            input_embeds=model.embed_input_ids(row([*text[1:], *[model.config.mask_token_id] * (count - 1)])),
            hidden_states=model.project_hidden_states(torch.cat([known, masks], dim=1)),
            attention_mask=create_block_mask(seen, None, None, length, length, device="cpu"),
            position_ids=(anchors + depths)[None],
        )
        logits = model.compute_logits(made)[0, known.shape[1] - 1 :]
        return round_of(text, [mapped(model, int(its.argmax())) for its in logits], logits)


class DeepSpecEagle3(TextByText):
    """EAGLE-3 by DeepSpec, from its repository."""

    def __init__(self, path: Path, target: PublicTarget) -> None:
        reach_deepspec()
        from deepspec.modeling.eagle3.qwen3 import Qwen3Eagle3Model

        self.model = loaded(Qwen3Eagle3Model(qwen3(path)), path, target)
        self.target = target

    @torch.inference_mode()
    def _draft(self, text: Sequence[int], count: int) -> Round:
        from deepspec.modeling.eagle3 import extract_eagle3_context_feature
        from transformers import DynamicCache

        known, cache = len(text) - 1, DynamicCache()
        places = torch.arange(known + count)[None]
        hidden = self.model.extend_draft_cache(
            hidden_states=extract_eagle3_context_feature(
                self.target.states(text[:-1]), self.model.target_layer_ids
            ),
            input_ids=row(text[1:]),
            position_ids=places[:, :known],
            past_key_values=cache,
        )
        drafts: list[int] = []
        logits = []
        for step in range(count):
            logits.append(self.model.compute_logits(hidden)[0, -1])
            drafts.append(int(logits[-1].argmax()))
            hidden = self.model(
                hidden_states=hidden,
                input_ids=row(drafts[-1:]),
                position_ids=places[:, known + step : known + step + 1],
                past_key_values=cache,
                use_cache=True,
            )
        return round_of(text, drafts, logits)


class TransformersMtp:
    """A head as transformers drafts with it, which makes as many tokens as there are heads: one."""

    def __init__(self, path: Path, target: PublicTarget) -> None:
        from transformers.modeling_layers import MtpModel

        model, depth = target.model, target.model.config.num_hidden_layers
        model.config.num_mtp_layers = 1
        model.config.name_or_path = str(path)
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{depth}\.", r"^mtp\."]
        model.config.mtp_hidden_states_first = any(".mtp_layers." in name for name in weights_of(path))
        if model.config.mtp_hidden_states_first:  # MiMo's order it knows, its names it does not
            self.model: Any = MtpModel(model, 1).eval()
            self.model.load_state_dict(dict(map(_from_mimo, weights_of(path).items())), strict=False)
        else:
            self.model = MtpModel.from_pretrained(model).eval()
        self.target = target

    def play(self, texts: Sequence[Sequence[int]], count: int) -> list[Round]:
        from transformers.cache_utils import MtpCache

        rounds, known = [], 0
        cache = MtpCache(config=self.model.config)
        first = self.target.model.config.mtp_hidden_states_first
        for text in texts:
            # MiMo's model hands on what its final norm reads: so its authors run it in vLLM.
            states = self.target.raw(text[:-1]) if first else self.target.states(text[:-1])[-1]
            with torch.inference_mode():
                ids, logits, _ = self.model(
                    input_ids=row(text[known + 1 :]),
                    last_hidden_states=states[:, known:],
                    attention_mask=None,
                    position_ids=torch.arange(known + 1, len(text))[None],
                    mtp_cache=cache,
                )
            rounds.append(round_of(text, ids[0], logits[0]))
            known = len(text) - 1
        return rounds


_MIMO = {
    "input_proj": "eh_proj",
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "final_layernorm": "post_norm",
}


def _from_mimo(entry: tuple[str, Any]) -> tuple[str, Any]:
    name = entry[0].removeprefix("model.mtp_layers.0.").removesuffix(".weight")
    return f"layers.0.{_MIMO.get(name, 'mtp_block.' + name)}.weight", entry[1]


class SpeculatorsMtp(TextByText):
    """A head that speculators trains, with the rows that a first step leaves behind, as engines run it."""

    def __init__(self, path: Path, target: PublicTarget) -> None:
        if "speculators_model_type" not in settings_of(path):  # Qwen's own names, which it converts
            path = _converted(path, target)
        self.model = speculator(path, target)
        self.target = target

    @torch.inference_mode()
    def _draft(self, text: Sequence[int], count: int) -> Round:
        model, hidden = self.model, self.target.states(text[:-1])[-1]
        ids = list(text[1:])
        drafts: list[int] = []
        logits = []
        for _ in range(count):
            places = torch.arange(len(ids))[None]
            made = model.mtp_layers[0](
                hidden_states=hidden,
                token_embeddings=model.embed_tokens(row(ids)),
                attention_mask=hidden.new_full((len(ids), len(ids)), -torch.inf).triu(1)[None, None],
                position_ids=places,
                position_embeddings=model.rotary_emb(hidden, places),
            )
            logits.append(model.lm_head(made[0, -1]))
            drafts.append(int(logits[-1].argmax()))
            ids.append(drafts[-1])
            hidden = torch.cat([hidden, made[:, -1:]], dim=1)
        return round_of(text, drafts, logits)


def _converted(path: Path, target: PublicTarget) -> Path:
    leave_out("datasets", "hs_connectors")
    from speculators.convert.mtp.converter import MTPConverter

    out = path.with_name(path.name + " converted")
    MTPConverter().convert(path, out, str(target.path), validate=False)
    return out
