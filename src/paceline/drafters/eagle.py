"""EAGLE heads: EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858), which share their weights, and EAGLE-3
(arXiv 2503.01840), in the layouts of SafeAILab, SpecForge, vLLM, speculators, DeepSpec and llama.cpp.

Row t pairs the embedding of token t + 1 with what the target made of token t, and guesses token t + 2.

    EAGLE-1     u = fc([e ; f])           a = u + attention(u)               f: after the target's final norm
    EAGLE-3     g = fc([low ; mid ; high])  a = g + attention([norm(e) ; norm(g)])

    o = a + mlp(norm(a));   logits = head(norm(o))      the next row starts from o in place of f or g

EAGLE-1 has neither a norm before its first attention nor one before the head. P-EAGLE is EAGLE-3 with rows of
masks behind the text's last: see `parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.checkpoint_ids import layer_ids, mask_token, parallel_length, target_ids
from paceline.drafters.head import TOPK, HeadDrafter
from paceline.drafters.head_config import decoder_config
from paceline.drafters.head_loading import HeadOptions, costs_of, lender_of
from paceline.drafters.head_program import HeadProgram
from paceline.drafters.loading import Host
from paceline.drafters.parallel import ParallelDrafter
from paceline.drafters.suitability import Facts, refuse_stranger
from paceline.errors import UnsupportedModelError


def load(found: Checkpoint, host: Host, options: HeadOptions) -> HeadDrafter:
    """Make a drafter of an EAGLE or EAGLE-3 checkpoint.

    Raises:
        ModelFileError: it is damaged, incomplete, or was made for another target.
        UnsupportedModelError: it asks for something that does not run here.
    """
    lender = lender_of(host)
    depth = lender.lent.config.layers
    refuse_stranger(found, Facts.of(lender), options.layers)
    head = HeadProgram(found, decoder_config(found), lender, threads=options.threads)
    if found.kind == "eagle":
        taps: tuple[int, ...] = (depth,)
        _Eagle(head).record()
    else:
        taps = options.layers or layer_ids(found, depth)
        _Eagle3(head, len(taps)).record()
    head.seal()
    ids = target_ids(found, head.vocab_size, lender.vocab_size)
    ends, costs = host.tokenizer.eog_ids, costs_of(host, head)
    if found.kind != "peagle":
        return HeadDrafter(found.kind, head, taps, ids, ends, costs, topk=options.topk or TOPK)
    return ParallelDrafter(
        found.kind,
        head,
        taps,
        ids,
        ends,
        costs,
        mask=mask_token(found, lender.vocab_size),
        state=found.values("mask_hidden").reshape(-1),
        longest=parallel_length(found),
        topk=options.topk or TOPK,
    )


class _Eagle:
    """Records EAGLE-1."""

    def __init__(self, head: HeadProgram) -> None:
        self.head, self.program, self.width = head, head.program, head.width
        head.same_width("output matrix")
        self.fuse = head.tensors.matrix("fc.weight", self.width, 2 * self.width)
        self.bias = head.tensors.bias("fc.bias", self.width)
        self.raw, self.feature = (self.program.buffer(self.width) for _ in range(2))
        self.both = self.program.acts(2 * self.width)

    def record(self) -> None:
        self.program.feed(self.raw)
        self.head.final_norm(self.raw, self.feature)
        self._row()
        self.head.next_part()
        self.program.feed(self.feature)
        self._row()

    def _row(self) -> None:
        head, program, layers = self.head, self.program, self.head.layers
        head.hand_out(self.feature)
        head.embed()
        program.quantize(head.embedded, self.both)
        program.quantize(self.feature, self.both, self.width)
        program.linear(self.both, [self.fuse], [self.bias], [layers.x])
        program.quantize(layers.x, layers.normed)
        layers.attend(0, layers.normed, self.width)
        layers.feed_forward(0)
        for layer in range(1, head.config.layers):
            layers.attention(layer)
            layers.feed_forward(layer)
        head.hand_out(layers.x)
        program.quantize(layers.x, head.last)
        head.output()


class _Eagle3:
    """Records EAGLE-3 for so many layers of the target."""

    def __init__(self, head: HeadProgram, taps: int) -> None:
        self.head, self.program, self.width = head, head.program, head.width
        found, lent = head.checkpoint, head.lender.lent
        self.flags = Flags(found)
        self.theirs, self.taps = lent.config.width, taps
        whole = taps * self.theirs
        self.fuse = head.tensors.matrix("fc.weight", self.width, whole)
        self.fused = self.program.buffer(self.width) if self.flags.residual_normed else head.layers.x
        self.states = self.program.acts(whole)
        self.both = self.program.acts(2 * self.width)
        self.made = self.program.buffer(self.width) if self.flags.chain_normed else -1

    def record(self) -> None:
        self._fuse()
        self._row()
        self.head.next_part()
        self.program.feed(self.fused)
        self._row()

    def _fuse(self) -> None:
        """Record g = fc(states of the target's layers, normalised or not)."""
        tensors, program, eps = self.head.tensors, self.program, self.head.config.norm_eps
        whole = self.taps * self.theirs
        if self.flags.norm_whole or not self.flags.norm_each:
            raw = program.buffer(whole)
            program.feed(raw)
            if self.flags.norm_whole:
                gamma = tensors.vector("enc.output_norm.weight", whole)
                program.norm(raw, gamma, eps, self.states)
            else:
                program.quantize(raw, self.states)
        else:
            for i in range(self.taps):
                raw = program.buffer(self.theirs)
                program.feed(raw, i * self.theirs)
                gamma = tensors.vector(f"fc_norm.{i}.weight", self.theirs)
                program.norm(raw, gamma, eps, self.states, i * self.theirs)
        program.linear(self.states, [self.fuse], [-1], [self.fused])

    def _row(self) -> None:
        head, program, layers, eps = self.head, self.program, self.head.layers, self.head.config.norm_eps
        head.hand_out(self.fused)
        head.embed()
        gamma = head.tensors.vector("blk.0.attn_norm.weight", self.width)
        program.norm(head.embedded, gamma, eps, self.both)
        gamma = head.tensors.vector("blk.0.attn_norm_2.weight", self.width)
        program.norm(self.fused, gamma, eps, self.both, self.width)
        if self.flags.residual_normed:
            program.float_norm(self.fused, gamma, eps, layers.x)
        layers.attend(0, self.both, 2 * self.width)
        layers.feed_forward(0)
        for layer in range(1, head.config.layers):
            layers.attention(layer)
            layers.feed_forward(layer)
        if self.flags.head_normed:
            layers.norm("output_norm", head.last)
        else:  # the file has the norm all the same
            head.checkpoint.tensors.pop("output_norm.weight", None)
            program.quantize(layers.x, head.last)
        head.checkpoint.tensors.pop("mask_hidden", None)  # is read where rows are fed
        if self.flags.chain_normed:
            gamma = head.tensors.vector("output_norm.weight", self.width)
            program.float_norm(layers.x, gamma, eps, self.made)
        head.hand_out(self.made if self.flags.chain_normed else layers.x)
        head.output()


class Flags:
    """What EAGLE-3 checkpoints differ in.

    Attributes:
        norm_whole: the states of the target's layers are normalised together (norm_before_fc).
        norm_each: each is normalised by itself (fc_norm).
        residual_normed: what goes around the attention is normalised too (norm_before_residual).
        head_normed: the output is normalised before the head: SpecForge's norm_output, true if missing.
        chain_normed: the next row starts from the normalised output: speculators' norm_output.
    """

    def __init__(self, found: Checkpoint) -> None:
        settings: Mapping[str, Any] = found.settings
        theirs = bool(settings.get("norm_output", found.layout != "speculators"))
        speculators = found.layout == "speculators"
        self.norm_whole = found.has("enc.output_norm.weight")
        self.norm_each = found.has("fc_norm.0.weight")
        self.residual_normed = bool(settings.get("norm_before_residual", False))
        self.head_normed = speculators or theirs
        self.chain_normed = speculators and theirs
        for key, given in (("norm_before_fc", self.norm_whole), ("fc_norm", self.norm_each)):
            if bool(settings.get(key, given)) != given:
                raise found.fault(
                    f"its settings say {key} = {settings.get(key)}, its tensors say {given}",
                    "the checkpoint is incomplete; download it again",
                )
        if self.norm_whole and self.norm_each:
            raise UnsupportedModelError(
                f"{found.path}: both norm_before_fc and fc_norm", "no such head is known"
            )
