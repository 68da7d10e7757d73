"""MTP heads, which models are published with: DeepSeek-V3 (arXiv 2412.19437), GLM, MiMo, Qwen, GGUF's nextn.

Row t pairs the embedding of token t + 1 with what the target made of token t, and guesses token t + 2.

    z = P [norm(e) ; norm(h)]        (MiMo: the other way round)
    y = decoder layer (z);   logits = head(norm(y))

Whether h is taken before or after the target's final norm, and whether the next row starts from y or from
norm(y), differs between families, and between engines for one family; a wrong choice costs acceptance and
no more. Where a checkpoint has several heads, each made for one step further, the first is used for all.

What a head of a family that runs here may still have, and is refused for: mixtures of experts, latent
attention, gated attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.checkpoint_ids import target_ids
from paceline.drafters.head import HeadDrafter
from paceline.drafters.head_config import decoder_config
from paceline.drafters.head_loading import HeadOptions, costs_of, lender_of
from paceline.drafters.head_program import HeadProgram
from paceline.drafters.loading import Host
from paceline.drafters.suitability import Facts, refuse_stranger

_AT = "blk.0.nextn."


@dataclass(frozen=True, slots=True)
class Flags:
    """What MTP heads differ in.

    Attributes:
        hidden_first: the target's state comes before the embedding.
        hidden_normed: it is taken after the target's final norm.
        chain_normed: the next row starts from the normalised output.
    """

    hidden_first: bool
    hidden_normed: bool
    chain_normed: bool

    @classmethod
    def of(cls, found: Checkpoint, options: HeadOptions) -> Flags:
        raw = found.layout == "MiMo V2"
        normed = (not raw) if options.hidden is None else options.hidden == "post"
        chained = (not raw) if options.chain is None else options.chain == "post"
        return cls(found.layout == "MiMo" or found.settings.get("model_type") == "mimo", normed, chained)


def load(found: Checkpoint, host: Host, options: HeadOptions) -> HeadDrafter:
    """Make a drafter of the MTP head of a checkpoint.

    Raises:
        ModelFileError: it is damaged, incomplete, or was made for another target.
        UnsupportedModelError: its layer does not run here, or it asks for something that does not.
    """
    lender = lender_of(host)
    refuse_stranger(found, Facts.of(lender))
    found.keep_layers(1)
    config = decoder_config(found)
    head = HeadProgram(found, config, lender, threads=options.threads, output=_AT + "shared_head_head.weight")
    _Mtp(head, Flags.of(found, options)).record()
    head.seal()
    ids = target_ids(found, head.vocab_size, lender.vocab_size)
    taps = (lender.lent.config.layers,)
    return HeadDrafter(found.kind, head, taps, ids, host.tokenizer.eog_ids, costs_of(host, head))


class _Mtp:
    """Records a head of one layer."""

    def __init__(self, head: HeadProgram, flags: Flags) -> None:
        self.head, self.program, self.width, self.flags = head, head.program, head.width, flags
        self.projection = head.tensors.matrix(_AT + "eh_proj.weight", self.width, 2 * self.width)
        self.hidden, self.made = (self.program.buffer(self.width) for _ in range(2))
        self.both = self.program.acts(2 * self.width)

    def record(self) -> None:
        if self.flags.hidden_normed:
            raw = self.program.buffer(self.width)
            self.program.feed(raw)
            self.head.final_norm(raw, self.hidden)
        else:
            self.program.feed(self.hidden)
        self._row()
        self.head.next_part()
        self.program.feed(self.hidden)
        self._row()

    def _row(self) -> None:
        head, program, layers, tensors = self.head, self.program, self.head.layers, self.head.tensors
        eps, width = head.config.norm_eps, self.width
        head.hand_out(self.hidden)
        head.embed(_AT + "embed_tokens.weight")
        first = self.flags.hidden_first
        program.norm(
            head.embedded, tensors.vector(_AT + "enorm.weight", width), eps, self.both, width * first
        )
        program.norm(
            self.hidden, tensors.vector(_AT + "hnorm.weight", width), eps, self.both, width * (not first)
        )
        program.linear(self.both, [self.projection], [-1], [layers.x])
        layers.attention(0)
        layers.feed_forward(0)
        gamma = self._last_norm()
        program.norm(layers.x, gamma, eps, head.last)
        if self.flags.chain_normed:
            program.float_norm(layers.x, gamma, eps, self.made)
        head.hand_out(self.made if self.flags.chain_normed else layers.x)
        head.output()

    def _last_norm(self) -> int:
        name = _AT + "shared_head_norm.weight"
        if self.head.tensors.has(name):
            return self.head.tensors.vector(name, self.width)
        return self.program.vector(self.head.lender.lent.final_norm)
