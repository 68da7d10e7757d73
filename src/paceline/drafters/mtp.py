"""MTP heads, which models are published with: DeepSeek-V3 (arXiv 2412.19437), GLM, MiMo, Qwen, GGUF's nextn.

Row t pairs the embedding of token t + 1 with what the target made of token t, and guesses token t + 2.

    z = P [norm(e) ; norm(h)]        (MiMo: the other way round)
    y = decoder layer (z);   logits = head(norm(y))

Whether h is taken before or after the target's final norm, and whether the next row starts from y or from
norm(y), differs between families, and between engines for one family; a wrong choice costs acceptance and
no more.

Where a checkpoint has several heads, head k makes step k, and the last one goes on. A row is the same pair
of a token and a state for all of them: the target's state in the text, in a draft what the head before made.
So each head has keys and values of every row, which depend on the pair alone and are filed when the row
comes by (compare llama.cpp's draft-mtp, which computes the rows of a draft anew for each head). With one
head, that one makes all steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.checkpoint_ids import target_ids
from paceline.drafters.head import TOPK, HeadDrafter
from paceline.drafters.head_config import decoder_config
from paceline.drafters.head_loading import HeadOptions, costs_of, lender_of
from paceline.drafters.head_program import HeadProgram
from paceline.drafters.loading import Host
from paceline.drafters.suitability import Facts, refuse_stranger


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
        first = found.layout == "MiMo" or found.settings.get("model_type") == "mimo"
        raw = found.layout == "MiMo V2"
        normed = not (first or raw) if options.hidden is None else options.hidden == "post"
        chained = (not raw) if options.chain is None else options.chain == "post"
        return cls(first, normed, chained)


def load(found: Checkpoint, host: Host, options: HeadOptions) -> HeadDrafter:
    """Make a drafter of the MTP heads of a checkpoint.

    Raises:
        ModelFileError: it is damaged, incomplete, or was made for another target.
        UnsupportedModelError: its layers do not run here, or it asks for something that does not.
    """
    lender = lender_of(host)
    if options.heads is not None:
        found.keep_layers(options.heads)
    refuse_stranger(found, Facts.of(lender))
    config = decoder_config(found)
    head = HeadProgram(found, config, lender, threads=options.threads, output=_name(0, "shared_head_head"))
    _Mtp(head, Flags.of(found, options)).record()
    head.seal()
    ids = target_ids(found, head.vocab_size, lender.vocab_size)
    taps = (lender.lent.config.layers,)
    ends, costs = host.tokenizer.eog_ids, costs_of(host, head)
    return HeadDrafter(found.kind, head, taps, ids, ends, costs, topk=options.topk or TOPK)


def _name(number: int, part: str) -> str:
    return f"blk.{number}.nextn.{part}.weight"


class _Mtp:
    """Records heads of one layer each."""

    def __init__(self, head: HeadProgram, flags: Flags) -> None:
        self.head, self.program, self.width, self.flags = head, head.program, head.width, flags
        self.count = head.config.layers
        self.hidden, self.made = (self.program.buffer(self.width) for _ in range(2))
        self.both = self.program.acts(2 * self.width)

    def record(self) -> None:
        if self.flags.hidden_normed:
            raw = self.program.buffer(self.width)
            self.program.feed(raw)
            self.head.final_norm(raw, self.hidden)
        else:
            self.program.feed(self.hidden)
        self._row(0)
        for number in range(min(1, self.count - 1), self.count):
            self.head.next_part()
            self.program.feed(self.hidden)
            self._row(number)

    def _row(self, number: int) -> None:
        """Record a row of one head, and what the other heads will want to see of it."""
        head, program, layers, eps = self.head, self.program, self.head.layers, self.head.config.norm_eps
        head.hand_out(self.hidden)
        for other in range(self.count):
            if other != number:
                self._project(other)
                layers.norm(f"blk.{other}.attn_norm", layers.normed)
                layers.file(other, layers.normed, self.width)
        self._project(number)
        layers.attention(number)
        layers.feed_forward(number)
        gamma = self._last_norm(number)
        program.norm(layers.x, gamma, eps, head.last)
        if self.flags.chain_normed:
            program.float_norm(layers.x, gamma, eps, self.made)
        head.hand_out(self.made if self.flags.chain_normed else layers.x)
        head.output(self._own(number, "shared_head_head"))

    def _project(self, number: int) -> None:
        """Record z of one head."""
        head, program, tensors, width = self.head, self.program, self.head.tensors, self.width
        eps, first = head.config.norm_eps, self.flags.hidden_first
        head.embed(self._own(number, "embed_tokens"))
        gamma = tensors.vector(self._own(number, "enorm"), width)
        program.norm(head.embedded, gamma, eps, self.both, width * first)
        gamma = tensors.vector(self._own(number, "hnorm"), width)
        program.norm(self.hidden, gamma, eps, self.both, width * (not first))
        projection = tensors.matrix(self._own(number, "eh_proj"), width, 2 * width)
        program.linear(self.both, [projection], [-1], [head.layers.x])

    def _last_norm(self, number: int) -> int:
        name = self._own(number, "shared_head_norm")
        if self.head.tensors.has(name):
            return self.head.tensors.vector(name, self.width)
        return self.program.vector(self.head.lender.lent.final_norm)

    def _own(self, number: int, part: str) -> str:
        """The name of a head's tensor; in Qwen's layout heads share all but their layer."""
        return _name(0 if self.head.checkpoint.layout == "Qwen" else number, part)
