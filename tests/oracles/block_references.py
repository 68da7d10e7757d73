"""Block drafters, DFlash and DSpark, run by public code; see public_code."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch

from oracles.public_code import (
    PublicTarget,
    TextByText,
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


class ZLab:
    """DFlash by its authors, who also decode with it: dflash. Texts are those that the target writes."""

    def __init__(self, path: Path, target: PublicTarget) -> None:
        from dflash.model import DFlashDraftModel

        self.model = loaded(DFlashDraftModel(qwen3(path)), path, target)
        self.target = target
        self.places: list[tuple[int, int]] = []
        self.logits: list[Any] = []
        self.model.register_forward_pre_hook(self._start, with_kwargs=True)
        compute = self.model.compute_logits
        self.model.compute_logits = lambda *given: self._finish(compute(*given))

    def play(self, texts: Sequence[Sequence[int]], count: int) -> list[Round]:
        self.places.clear()
        self.logits.clear()
        with torch.inference_mode():
            written = self.model.spec_generate(self.target.model, row(texts[-2]), 2 * len(texts), None)
        rounds = zip(self.places, self.logits, strict=True)
        return [
            round_of(written[0, : start + 1].tolist(), rows.argmax(dim=-1)[:count], rows[:count])
            for (start, size), rows in rounds
            if size == self.model.block_size  # the last block is cut to what is still wanted
        ]

    def save(self, path: Path) -> None:
        self.model.save_pretrained(path)

    def _start(self, _model: Any, _given: Any, named: Mapping[str, Any]) -> None:
        size = named["noise_embedding"].shape[1]
        self.places.append((int(named["position_ids"][0, -1]) + 1 - size, size))

    def _finish(self, logits: Any) -> Any:
        self.logits.append(logits[0])
        return logits


class SpecForgeBlock(TextByText):
    """DFlash and DSpark as specforge trains them: blocks with the masks and labels of its training."""

    def __init__(self, path: Path, target: PublicTarget) -> None:
        from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

        config = AutoDraftModelConfig.from_file(str(path / "config.json"))
        config._attn_implementation = "eager"
        self.model = loaded(AutoDraftModel.from_config(config), path, target)
        self.target = target

    @torch.inference_mode()
    def _draft(self, text: Sequence[int], count: int) -> Round:
        hidden = self.model(
            position_ids=torch.arange(len(text) - 1 + self.model.block_size)[None],
            noise_embedding=self.target.embedding(_block(text, self.model)),
            target_hidden=self._features(text),
            attention_mask=self._masks(len(text) - 1),
        )
        if not hasattr(self.model, "markov_head"):
            logits = self.target.head(hidden[0, 1 : count + 1])
            return round_of(text, logits.argmax(dim=-1), logits)
        return _chain(self.model, text, hidden[:, :count], self.target.head)

    def _features(self, text: Sequence[int]) -> Any:
        from specforge.modeling.draft.dflash import extract_context_feature

        return extract_context_feature(self.target.states(text[:-1]), self.model.target_layer_ids)

    def _masks(self, known: int) -> dict[str, Any]:
        from specforge.algorithms.common.dflash_family_model import create_dflash_sdpa_mask

        def mask(window: int | None) -> Any:
            return create_dflash_sdpa_mask(
                torch.tensor([[known]]),
                torch.ones((1, 1), dtype=torch.bool),
                known,
                self.model.block_size,
                torch.device("cpu"),
                sliding_window=window,
            )

        return {"full_attention": mask(None), "sliding_attention": mask(self.model.sliding_window)}


def _block(text: Sequence[int], model: Any) -> Any:
    return row([text[-1], *[model.mask_token_id] * (model.block_size - 1)])


def _chain(model: Any, text: Sequence[int], hidden: Any, head: Any) -> Round:
    """Tokens from left to right, each with a view of the one before, as SpecForge and DeepSpec both do it."""
    base, anchor = head(hidden), torch.tensor([text[-1]])
    if model.markov_head is None:
        drafts, logits = base.argmax(dim=-1), base
    else:
        drafts, logits = model.markov_head.sample_block_tokens(
            base, first_prev_token_ids=anchor, hidden_states=hidden
        )
    before = torch.cat([anchor[None], drafts[:, :-1]], dim=1)
    ask = getattr(model, "predict_confidence", None) or model.predict_confidence_step
    return round_of(text, drafts[0], logits[0], ask(hidden, prev_token_ids=before))


class DeepSpecBlock(TextByText):
    """DSpark by its authors, from their repository: no package has it."""

    def __init__(self, path: Path, target: PublicTarget) -> None:
        reach_deepspec()
        from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel

        self.model = loaded(Qwen3DSparkModel(qwen3(path)), path, target)
        self.target = target

    @torch.inference_mode()
    def _draft(self, text: Sequence[int], count: int) -> Round:
        from deepspec.modeling.dspark.common import extract_context_feature

        hidden = self.model._forward_backbone(
            target_hidden_states=extract_context_feature(
                self.target.states(text[:-1]), self.model.target_layer_ids
            ),
            noise_embedding=self.model.embed_tokens(_block(text, self.model)),
            position_ids=torch.arange(len(text) - 1 + self.model.block_size)[None],
            is_causal=False,
        )
        return _chain(self.model, text, hidden[:, :count], self.model.lm_head)


class SpeculatorsBlock(TextByText):
    """DFlash and DSpark as speculators trains them, asked again with each drafted token taught."""

    def __init__(self, path: Path, target: PublicTarget) -> None:
        self.model = speculator(path, target)
        self.target = target
        self.first = 0 if self.model.config.sample_from_anchor else 1

    @torch.inference_mode()
    def _draft(self, text: Sequence[int], count: int) -> Round:
        drafts: list[int] = []
        logits, sure = [], []
        for slot in range(self.first, self.first + count):
            rows, chances = self._train(text, drafts)
            logits.append(rows[slot])
            sure += [] if chances is None else [chances[slot]]
            drafts.append(mapped(self.model, int(logits[-1].argmax())))
        return round_of(text, drafts, logits, torch.stack(sure) if sure else None)

    def _train(self, text: Sequence[int], drafts: Sequence[int]) -> tuple[Any, Any]:
        """Logits, and what the confidence head says, of the block at the last token in a step of training."""
        module = importlib.import_module(type(self.model).__module__)
        anchor, size = len(text) - 1, self.model.block_size
        states = self.target.states(text[:-1])
        known = torch.cat([states[i] for i in self.model.target_layer_ids], dim=-1)
        behind = known.new_zeros(1, size + 1, known.shape[2])
        given = torch.cat([known, behind], dim=1)
        ids = row([*text, *drafts, *[0] * (size - len(drafts))])
        chosen = torch.zeros_like(ids)
        chosen[0, anchor] = 1
        caught: list[Any] = []

        def measure(logits: Any, _targets: Any, second: Any, *_rest: Any, **_named: Any) -> tuple[Any, Any]:
            caught.extend((logits, second))
            return logits.sum(), {}

        with mock.patch.object(module, "compute_metrics", measure):
            self.model(
                hidden_states=given,
                input_ids=ids,
                loss_mask=chosen,
                verifier_last_hidden_states=given.new_zeros(1, ids.shape[1], self.model.hidden_size),
                document_ids=torch.zeros_like(ids),
                max_anchors=1,
            )
        sparks = hasattr(self.model, "confidence_head") and self.model.confidence_head is not None
        return caught[0][0], caught[1][0] if sparks else None


class TransformersBlock:
    """DFlash as transformers drafts with it: Muse Glimmer's drafter, which is z-lab's network."""

    names: ClassVar[Mapping[str, str]] = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }

    def __init__(self, path: Path, target: PublicTarget) -> None:
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

        settings = settings_of(path)
        own = {"architectures", "model_type", "dflash_config", "rope_theta", "rope_scaling"}
        config = MuseGlimmerAssistantConfig(
            **{key: value for key, value in settings.items() if key not in own and value is not None},
            **settings["dflash_config"],
            rope_parameters={"rope_type": "default", "rope_theta": settings["rope_theta"]},
        )
        config._attn_implementation = "eager"
        self.model = MuseGlimmerAssistantModel(config)
        self.model.load_state_dict({self.names.get(k, k): v for k, v in weights_of(path).items()})
        self.model.to(target.dtype).eval()
        self.target, self.path = target, path

    def play(self, texts: Sequence[Sequence[int]], count: int) -> list[Round]:
        from transformers import GenerationConfig
        from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

        generator = DFlashTokenCandidateGenerator(
            self.model,
            self.target.embedding,
            self.target.head,
            GenerationConfig(max_length=1 << 20, do_sample=False),
        )
        rounds, known = [], 0
        for text in texts:
            fresh = SimpleNamespace(hidden_states=[its[:, known:] for its in self.target.states(text[:-1])])
            places = {"position_ids": torch.arange(len(text))[None], "attention_mask": None}
            matches = len(text) - 2 - known
            with torch.inference_mode():
                ids, logits = generator.get_candidates(row(text), places, fresh, False, matches)
            rounds.append(round_of(text, ids[0, len(text) : len(text) + count], logits[0, :count]))
            known = len(text) - 1
        return rounds

    def save(self, path: Path) -> None:
        back = {theirs: ours for ours, theirs in self.names.items()}
        named = {back.get(name, name): values for name, values in self.model.state_dict().items()}
        write(path, named, settings_of(self.path))
