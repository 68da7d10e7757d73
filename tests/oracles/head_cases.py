"""Random checkpoints that public code runs, and who runs each; see record_heads.

By whom: SafeAILab's eagle-llm (EAGLE-1), angelslim (EAGLE-3 as SafeAILab drafts), specforge, speculators,
z-lab's dflash, transformers, and from repositories DeepSpec and SafeAILab's EAGLE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from support.block_heads import TinyHead as TinyBlock
from support.folders import TinyFolder
from support.tiny_heads import TinyHead
from support.tiny_mtp import TinyMtp
from support.tiny_peagle import TinyPeagle

LAYERS = 8
VOCAB = 258
TARGET = TinyFolder(family="llama", settings={"num_hidden_layers": LAYERS})
SOURCES = ("SafeAILabSource", "DeepSpecEagle3", "DeepSpecBlock")
"""Who runs from clones of repositories."""


@dataclass(frozen=True, kw_only=True)
class PublicCase:
    """A checkpoint and who runs it.

    Attributes:
        by: name of a class in head_references or block_references.
        count: tokens to draft behind each text.
    """

    head: TinyHead | TinyBlock
    by: str
    count: int = 4


def _eagle() -> dict[str, PublicCase]:
    plain = TinyHead(
        kind="eagle", vocab=VOCAB, taps=(LAYERS,), draft_vocab=0, own_embedding=True, scale=0.8,
        settings={"bias": False},
    )  # fmt: skip
    heads = {
        "EAGLE-1": replace(plain, bias=True, settings={"bias": True}),
        "EAGLE-1 without bias": plain,
        "EAGLE-1 of two layers": replace(plain, layers=2),
    }
    return {name: PublicCase(head=head, by="SafeAILab") for name, head in heads.items()}


def _eagle3() -> dict[str, PublicCase]:
    plain = TinyHead(vocab=VOCAB, taps=(2, 4, 5), draft_vocab=100)
    forge = replace(
        plain, layout="SpecForge", own_embedding=True, settings={"pretraining_tp": 1, "hidden_act": "silu"}
    )
    theirs = replace(plain, layout="speculators")
    wide = {"qk_norm": True, "head_dim": 32}
    steps = {"ttt_length": 7, "step_loss_decay": 0.8}
    sliding = {"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 8,
               "use_sliding_window": True}  # fmt: skip
    deep = replace(plain, layout="DeepSpec", **wide, taps=(1, 2, 4, 6, 7), draft_vocab=0, own_embedding=True)
    by = {
        "AngelSlim": {
            "SafeAILab": plain,
            "SafeAILab, all ids": replace(plain, draft_vocab=0),
        },
        "SpecForge": {
            "SpecForge": replace(forge, taps=(1, 3, 7)),
            "SpecForge, norms of each state": replace(forge, fc_norm=True),
            "SpecForge, no norm before the head": replace(forge, norm_output=False),
            "SpecForge, all ids": replace(forge, draft_vocab=0),
        },
        "Speculators": {
            "speculators": theirs,
            "speculators, five taps": replace(theirs, taps=(1, 2, 4, 6, 7)),
            "speculators, normed between steps": replace(theirs, norm_output=True),
            "speculators, a norm before everything": replace(
                theirs, norm_before_fc=True, norm_before_residual=True
            ),
            "speculators, norms of each state": replace(theirs, fc_norm=True, norm_output=True),
            "speculators, qwen3": replace(theirs, **wide, own_embedding=True),
            "speculators, two layers": replace(theirs, layers=2),
            "speculators, llama 3 rope": replace(theirs, layer={"rope_parameters": _LLAMA3}),
            "speculators, a window": replace(theirs, **wide, layer=sliding),
        },
        "DeepSpecEagle3": {"DeepSpec": replace(deep, settings=steps)},
        "SafeAILabSource": {"SafeAILab's repository": plain},
    }
    # Its training lets later steps of a head see as far back as the first; ours go on with their own windows.
    counts = {"speculators, a window": 1}
    return {
        f"EAGLE-3, {name}": PublicCase(head=head, by=who, count=counts.get(name, 4))
        for who, heads in by.items()
        for name, head in heads.items()
    }


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _peagle() -> dict[str, PublicCase]:
    theirs = TinyPeagle(vocab=VOCAB, taps=(2, 4, 5), draft_vocab=100)
    forge = {"pretraining_tp": 1, "hidden_act": "silu", "num_depths": 5}
    heads = {
        "speculators": theirs,
        "speculators, qwen3, norms": replace(
            theirs, qk_norm=True, head_dim=32, norm_before_residual=True, fc_norm=True, draft_vocab=0
        ),
        "SpecForge": replace(theirs, layout="SpecForge", settings=forge),
    }
    by = {"speculators": "SpeculatorsParallel", "SpecForge": "SpecForgeParallel"}
    return {
        f"P-EAGLE, {name}": PublicCase(head=head, by=by[head.layout], count=5) for name, head in heads.items()
    }


def _dflash() -> dict[str, PublicCase]:
    plain = TinyBlock(vocab=VOCAB, target_layers=LAYERS, taps=(0, 3, 5))
    forge = replace(plain, layout="specforge", settings={"block_size": plain.block})
    theirs = replace(plain, layout="speculators")
    by: dict[str, dict[str, TinyBlock]] = {
        "ZLab": {
            "z-lab": plain,
            "z-lab, windows": replace(plain, sliding=(0,), window=20),
            "z-lab, windows both ways": replace(
                plain, sliding=(0, 1), window=20, settings={"is_causal": False}
            ),
            "z-lab, causal": replace(plain, settings={"is_causal": True}),
            "z-lab, another rope": replace(plain, theta=500.0),
        },
        "TransformersBlock": {"transformers": plain},
        "SpecForgeBlock": {
            "SpecForge": forge,
            "SpecForge, windows": replace(forge, sliding=(1,), window=20),
        },
        "SpeculatorsBlock": {
            "speculators": replace(theirs, draft_vocab=100),
            "speculators, all ids": theirs,
            "speculators, anchor first": replace(theirs, settings={"sample_from_anchor": True}),
            # One window for a whole block, as it trains them: here so wide that it ends nowhere.
            "speculators, causal layers": replace(theirs, sliding=(1,), window=400),
        },
    }
    return {
        f"DFlash, {name}": PublicCase(head=head, by=who, count=5 if "anchor first" in name else 4)
        for who, heads in by.items()
        for name, head in heads.items()
    }


def _dspark() -> dict[str, PublicCase]:
    plain = TinyBlock(vocab=VOCAB, target_layers=LAYERS, taps=(0, 3, 5), confidence=True)
    forge = replace(plain, layout="specforge", settings={"block_size": plain.block})
    theirs = replace(plain, layout="speculators", draft_vocab=100)
    deep = replace(plain, layout="deepspec", own=True)
    bonus = replace(theirs, settings={"sample_from_anchor": False})
    layouts = {
        "SpecForge": ("SpecForgeBlock", forge),
        "speculators": ("SpeculatorsBlock", theirs),
        "speculators, bonus anchor": ("SpeculatorsBlock", bonus),
        "DeepSpec": ("DeepSpecBlock", deep),
    }
    found = {
        f"DSpark, {name}, {kind}": PublicCase(
            head=replace(head, markov=kind, confidence=kind != "vanilla"),
            by=by,
            count=4 if head is bonus else 5,
        )
        for name, (by, head) in layouts.items()
        for kind in ("vanilla", "gated", "rnn")
    }
    alone = replace(deep, confidence=None)
    found["DSpark, DeepSpec, no Markov head"] = PublicCase(head=alone, by="DeepSpecBlock", count=5)
    return found


def _mtp() -> dict[str, PublicCase]:
    plain = TinyMtp(vocab=VOCAB, target_layers=LAYERS, head_dim=32, taps=(LAYERS,))
    qwen = {"model_type": "qwen3", "head_dim": 32, "intermediate_size": plain.hidden, "vocab_size": VOCAB}
    normed = replace(plain, qk_norm=True)
    return {
        "MTP, DeepSeek": PublicCase(head=replace(plain, layout="DeepSeek"), by="TransformersMtp", count=1),
        "MTP, MiMo": PublicCase(head=replace(plain, layout="MiMo"), by="TransformersMtp", count=1),
        "MTP, Qwen": PublicCase(head=plain, by="TransformersMtp", count=1),
        "MTP, Qwen, several steps": PublicCase(head=replace(normed, settings=qwen), by="SpeculatorsMtp"),
        "MTP, speculators": PublicCase(head=replace(normed, layout="speculators"), by="SpeculatorsMtp"),
    }


CASES: dict[str, PublicCase] = {**_eagle(), **_eagle3(), **_peagle(), **_dflash(), **_dspark(), **_mtp()}
