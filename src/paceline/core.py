"""The shared vocabulary: what a request asks, what a drafter offers, what a pass takes and returns.

Nothing here computes. Every other package may import this one; it imports only `errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError, suggest

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.uint32]
"""A set of token ids as bits: id i is in it if bit i % 32 of word i // 32 is set; ids beyond it are not."""

FinishReason = Literal["stop", "length", "abort"]

ROOT = -1
"""Parent of a draft node that follows directly on the committed text."""

_MOST_STOP_CHARS = 4096  # each is a state of what looks for them


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Names and meanings follow vLLM and the OpenAI API.

    The processors run in this order, on each position alone: repetition penalty, frequency and
    presence penalty, logit_bias, the constraint's mask if there is one, min_tokens (bans stop tokens),
    temperature, top_k, top_p, min_p.

    Attributes:
        temperature: 0 means greedy; ties go to the lowest id.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the likeliest.
        seed: key of the position noise. None draws one and reports it in the result.
        max_tokens: cap on generated tokens; None means up to the context limit.
        min_tokens: stop tokens cannot be sampled before this many tokens were generated.
        stop: strings that end the text; the text is cut before the one that completes first. At most 4096
            characters in all.
        stop_token_ids: token ids that end the text, besides the model's own end-of-generation ids.
        ignore_eos: do not end at the model's own end-of-generation ids.
        presence_penalty: subtracted once from the logit of each token already generated.
        frequency_penalty: subtracted once per occurrence among the generated tokens.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        logit_bias: added to the logits of these token ids.
        logprobs: None for none, else how many of the likeliest alternatives to report per token.
        n: independent completions of one prompt; completion i uses seed + i.
        verification: "coupled" compares drafts with the target's own sample (same bytes as plain
            decoding); "rejection" is textbook rejection sampling (same distribution, other bytes).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    n: int = 1
    verification: Literal["coupled", "rejection"] = "coupled"

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_whole("top_k", self.top_k, -1, 2**31 - 1)
        _check_whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_whole("n", self.n, 1, 128)
        if self.seed is not None:
            _check_whole("seed", self.seed, -(2**63), 2**64 - self.n)  # the last answer's is seed + n - 1
        if self.max_tokens is not None:
            _check_whole("max_tokens", self.max_tokens, 0, 2**31 - 1)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, 100)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}", "give True or False")
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        if (length := sum(map(len, self.stop))) > _MOST_STOP_CHARS:
            raise RequestError(f"stop has {length} characters", f"give at most {_MOST_STOP_CHARS} in all")
        object.__setattr__(self, "stop_token_ids", tuple(token_ids("stop_token_ids", self.stop_token_ids)))
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias is {self.logit_bias!r}, not a mapping", "give {token id: bias}, as in {42: -1.5}"
            )
        for token, bias in zip(
            token_ids("logit_bias", self.logit_bias), self.logit_bias.values(), strict=True
        ):
            _check(f"logit_bias[{token}]", bias, -1e4, 1e4)
        if self.verification not in ("coupled", "rejection"):
            raise RequestError(f"verification is {self.verification!r}", "use 'coupled' or 'rejection'")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", "lower min_tokens"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from outside input; an unknown name is refused with a suggestion."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise RequestError(f"unknown sampling parameter {name!r}", suggest(str(name), known))
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise RequestError(f"{name} is {value!r}, not a number", f"give a number from {low} to {high}")
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        bounds = f"{'above' if open_low else 'from'} {low} to {high}"
        raise RequestError(f"{name} is {value}", f"give a value {bounds}")


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if not is_whole(value) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}", f"give a whole number from {low} to {high}")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value from outside is a whole number; True and 3.0 are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _strings(name: str, values: object) -> tuple[str, ...]:
    found = (values,) if isinstance(values, str) else values
    if isinstance(found, bytes) or not isinstance(found, Sequence):
        raise RequestError(f"{name} is {values!r}", "give a string or a list of strings")
    for one in found:
        if not isinstance(one, str):
            raise RequestError(f"{name} holds {one!r}, not a string", "give a string or a list of strings")
        if not one:
            raise RequestError(
                f"{name} holds an empty string", "remove it; every text contains the empty string"
            )
    return tuple(found)


def token_ids(name: str, values: object) -> list[int]:
    """Token ids that came from outside, as ints. Raises RequestError for anything else; the range is not
    checked, since it is the model's."""
    if isinstance(values, str | bytes | bytearray | memoryview) or not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r}", "give a list of token ids")
    found = list(values)
    for one in found:
        if not is_whole(one):
            raise RequestError(f"{name} holds {one!r}, not a token id", "token ids are whole numbers")
    return [int(one) for one in found]


class Constraint(Protocol):
    """What limits the next token of one request: a grammar, and how far the text has come in it.

    It moves only by `advance`, once per committed token, so a rejected draft leaves no trace in it.
    """

    @property
    def stopped(self) -> bool:
        """Whether the text is complete: only tokens that end it are allowed."""
        ...

    def mask(self) -> Mask | None:
        """[ceil(vocab / 32)] the token ids allowed next; None allows every one. Not to be written to.

        Raises:
            RequestError: what follows is too complex to be worked out within bounds.
        """
        ...

    def advance(self, token: int) -> None:
        """Follow one committed token, one that the mask allowed."""
        ...

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first, could follow; moves nothing."""
        ...

    def forced(self) -> list[int]:
        """Tokens that have to follow, as far as that is cheap to tell; often none.

        They spell the only text that can follow. Where other tokens spell it too the model may choose
        those, so they are a draft, not a decision.
        """
        ...

    def fresh(self) -> Constraint:
        """The same constraint at the start of a text, independent of this one."""
        ...


@dataclass(slots=True)
class Context:
    """What a drafter may look at: one request's committed text.

    Attributes:
        request: identity of the request, never reused within a process.
        tokens: prompt and committed output, grown in place by the engine; drafters only read it.
        prompt_length: how many of `tokens` are prompt.
        prediction: text that the caller expects the output to resemble, as token ids.
        params: how the request is sampled; a drafter that samples does the same.
        seed: key of the request's noise, which a drafter may draw too: it then agrees more often.
        constraint: what limits the output, advanced to the end of `tokens`; drafters never advance it.
    """

    request: int
    tokens: list[int]
    prompt_length: int
    prediction: Sequence[int] = ()
    params: SamplingParams = SamplingParams(temperature=0.0)
    seed: int = 0
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of guessed tokens. A chain is a tree without branches.

    Attributes:
        tokens: [n] guessed token ids. A draft has so few that lists are quicker than arrays.
        parents: [n] index of each node's parent, ROOT for children of the committed text;
            parents[i] < i always. Siblings carry different tokens.
        chances: [n] calibrated probability that the target takes the node, given that it took the parent.
        sources: [n] name of the drafter that offered each node.
        probs: [n, vocab] distribution each node was drawn from; None means one-hot. Only rejection
            sampling reads it.
    """

    tokens: list[int]
    parents: list[int]
    chances: list[float]
    sources: tuple[str, ...]
    probs: Floats | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int], chances: Sequence[float], source: str) -> Draft:
        n = len(tokens)
        return cls(list(tokens), list(range(-1, n - 1)), list(chances), (source,) * n)

    @classmethod
    def empty(cls) -> Draft:
        return cls.chain((), (), "")

    def path_chances(self) -> list[float]:
        """Probability of each node being reached and taken: the product of chances from the root."""
        path = list(self.chances)
        for i, parent in enumerate(self.parents):
            if parent != ROOT:
                path[i] *= path[parent]
        return path


@dataclass(slots=True)
class Outcome:
    """What became of a checked draft.

    Attributes:
        draft: the nodes that were checked in the pass.
        path: indices of the accepted nodes, root first; each is a child of the one before.
        committed: token ids committed by this step: accepted ones, then the bonus or correction.
        tested: (node, accepted) for every node whose parent was accepted: the ones the target decided on.
            A node behind a rejected parent is censored: nothing was learnt about it.
    """

    draft: Draft
    path: tuple[int, ...]
    committed: tuple[int, ...]
    tested: list[tuple[int, bool]] = field(init=False)

    def __post_init__(self) -> None:
        reached = {ROOT, *self.path}
        accepted = set(self.path)
        self.tested = [(i, i in accepted) for i, p in enumerate(self.draft.parents) if p in reached]


class Drafter(Protocol):
    """Guesses tokens. One file each, one row in `drafters.registry`.

    A drafter never sees logits of the target, and never changes text: a wrong guess costs time only. All
    methods are called from one thread.
    """

    name: str

    def propose(self, context: Context, budget: int) -> Draft:
        """Offer at most `budget` nodes; an empty draft is always fine. Must not change `context`."""
        ...

    def commit(self, context: Context, outcome: Outcome | None) -> None:
        """Follow `context.tokens` to its present end, and learn from `outcome` (None after prefill,
        or when nothing was drafted). Called after every step, also while speculation is off."""
        ...

    def forget(self, context: Context) -> None:
        """The request is over; keep only what may serve later requests."""
        ...


@runtime_checkable
class HearingDrafter(Drafter, Protocol):
    """A drafter that reads the target's hidden states.

    Attributes:
        layers: whose inputs it reads, ascending: 0 is the embedding, the number of layers what the final norm
            is given.
    """

    layers: Sequence[int]

    def hear(self, context: Context, start: int, hidden: Mapping[int, Floats]) -> None:
        """Take the states of the tokens at start, start + 1, ... of the request: layer -> [n, width].

        Called before `commit`, for every token whose pass is over: the last one committed has no states yet.
        A prefix that was found in the cache is never computed again, so `start` may leave a gap. The arrays
        are never written again, so they may be kept; each may hold on to all rows of its pass.
        """
        ...


@dataclass(frozen=True, slots=True)
class Prices:
    """What the target's next pass costs, for a drafter that must weigh its own time against it.

    Attributes:
        plain: seconds of the step without this drafter.
        tokens: that it commits then.
        extra: [n + 1] seconds that 0, 1, ... more draft rows add.
    """

    plain: float
    tokens: float
    extra: Sequence[float]


@runtime_checkable
class CostlyDrafter(Drafter, Protocol):
    """A drafter whose guesses cost passes of a model: asked for all requests together, and told the prices.

    It answers with empty drafts where drafting would not pay. `propose` drafts as much as it is asked for,
    whatever that costs.
    """

    def propose_many(
        self, contexts: Sequence[Context], budgets: Sequence[int], prices: Prices | None
    ) -> list[Draft]:
        """Offer drafts of at most `budgets[i]` nodes for all requests: as far as they pay, or, when no
        prices are given, of that length."""
        ...

    def price(self, context: Context) -> float:
        """Seconds that the smallest draft for this request would take, catching up included."""
        ...


@dataclass(slots=True)
class Rows:
    """The rows of one pass of the target, over any number of sequences.

    Attributes:
        tokens: [R] token ids.
        positions: [R] absolute positions: they turn rope and key the noise.
        slots: [R] where the row's KV goes within its sequence. slot == position, except for siblings in a
            tree, which take the next free slots.
        parents: [R] row index of the parent, for draft-tree rows; ROOT for every row that sees all slots
            below its own position. A row whose parents chain up to row t sees the slots below position(t),
            the slots of its ancestors, and itself.
        sequences: [R] index into `tables`.
        tables: [S, P] page ids of each sequence, as given by the KV cache.
        wanted: [W] row indices whose output is needed, ascending.
        logits: whether `Output.logits` is needed; otherwise only argmax is computed.
        window_tables: [S, P] page ids for layers with a window, of those pages that a row still sees; None
            where no layer has one, or where `tables` serve all layers.
    """

    tokens: Ids
    positions: Ids
    slots: Ids
    parents: Ids
    sequences: Ids
    tables: Ids
    wanted: Ids
    logits: bool
    window_tables: Ids | None = None


@dataclass(frozen=True, slots=True)
class WindowPages:
    """The pages of layers that see a sliding window; the others have pages of their own.

    Attributes:
        size: positions that a row sees in these layers, its own included.
        pages: how many there are, numbered from 0.
        rows: most rows of a pass.
        copy_page: copies one, from source to target.
    """

    size: int
    pages: int
    rows: int
    copy_page: Callable[[int, int], None]


@dataclass(slots=True)
class Output:
    """What a pass returns for the wanted rows.

    Attributes:
        argmax: [W] likeliest token of each wanted row, lowest id on ties.
        logits: [W, vocab] float32, or None when not asked. Valid until the next pass.
        hidden: [R, width] float32 of every row for each layer that the target was told to listen at: what
            entered it. Never written again.
    """

    argmax: Ids
    logits: Floats | None
    hidden: Mapping[int, Floats] = field(default_factory=dict)


class Target(Protocol):
    """A model that checks drafts. `models.target` implements it over native code, tests over stubs."""

    vocab_size: int
    context_limit: int
    max_rows: int
    page_size: int
    pages: int

    @property
    def window(self) -> WindowPages | None:
        """None if every layer sees everything, or keeps it all the same."""
        ...

    def forward(self, rows: Rows) -> Output:
        """Run one pass; writes the rows' KV to their slots. Row values never depend on other rows."""
        ...

    def listen(self, layers: Sequence[int]) -> None:
        """Have every pass return what enters these layers, in `Output.hidden`."""
        ...

    def move(
        self,
        table: Ids,
        sources: Sequence[int],
        targets: Sequence[int],
        window_table: Ids | None = None,
    ) -> None:
        """Copy KV from slot to slot of one sequence (compaction of an accepted tree path).

        Copies happen in order; sources[i] >= targets[i] and both ascend.
        """
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy a whole page (copy-on-write of a shared prefix)."""
        ...


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token under the model (raw logits, before any processor)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Timings:
    """Seconds of one request; prefill and decode apart. Decode excludes the token that prefill yields.

    `queue_s` ends when its prompt is first worked on; `time_to_first_token_s` includes it.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    time_to_first_token_s: float = 0.0


@dataclass(slots=True)
class Claims:
    """Draft tokens of about the same chance that the target decided on.

    Attributes:
        decided: how many.
        expected: the sum of their chances.
        right: how many were accepted.
    """

    decided: int = 0
    expected: float = 0.0
    right: int = 0


CLAIM_CLASSES = 10


@dataclass(slots=True)
class DrafterStats:
    """What one drafter contributed.

    Attributes:
        claims: class i holds chances from i / CLAIM_CLASSES up to the next; classes without any are left out.
    """

    drafted: int = 0
    accepted: int = 0
    claims: dict[int, Claims] = field(default_factory=dict)


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one request. Definitions are the field's own.

    Attributes:
        passes: decode passes of the target (prefill excluded).
        drafts: passes that checked at least one draft token.
        drafted: draft tokens checked.
        accepted: draft tokens kept.
        accepted_per_position: how many passes kept their first i+1 draft tokens.
        committed: tokens committed by decode passes, bonus and correction included.
        by_drafter: the same two counts for each drafter.
        drafters: names of all that could be asked, those found near the model among them.
        off_reason: why nothing was drafted, or None if something was.
    """

    passes: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    committed: int = 0
    by_drafter: dict[str, DrafterStats] = field(default_factory=dict)
    drafters: list[str] = field(default_factory=list)
    off_reason: str | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per decode pass, bonus included; 1.0 when nothing was decoded."""
        return self.committed / self.passes if self.passes else 1.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(slots=True)
class Completion:
    """One finished text.

    Attributes:
        token_sources: for each token, the drafter that guessed it, or "" when the target wrote it itself.
        seed: the seed in effect, also when it was drawn for the caller.
        stop_reason: the stop string or stop token id that ended the text, None otherwise.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    timings: Timings
    speculation: SpeculationStats
    seed: int
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    token_sources: list[str] = field(default_factory=list)
