"""Suffix decoding: what followed when this request, or an earlier response, said the same thing?

Source: suffix decoding (arXiv 2411.04975) for the two histories and the best-first tree; prediction by
partial matching (Cleary and Witten 1984) for how contexts of several lengths share the probability: the
surest guess speaks first, and each further one gets its part of what those before it leave over. Index and
search are native; what decides the chances is learnt here.
"""

from __future__ import annotations

from pathlib import Path

from paceline.core import Context, Draft, Outcome
from paceline.drafters.calibration import Calibration, Luck
from paceline.drafters.offer import judge
from paceline.drafters.store import ResponseStore
from paceline.native import ContextTree, SuffixOffer, suffix_offer

# In the order that `suffix.h` gives the features: who knows the guess (the request itself, earlier responses,
# both); its rank; the class of the length that matched; seen once, twice or more, and nothing else ever;
# one of several, seen 1, 2, 3-5 or more times in the longest known context; the same in a shorter one.
_WEIGHTS = (
    *(-0.1, -1.0, 0.2),
    *(0.3, 0.1, -0.2),
    *(0.0, -1.0, -0.2, 0.0, 0.3, 0.4, 0.6, 1.0, 1.5, 2.5),
    *(0.4, 1.0, 2.0),
    *(-0.8, -0.6, 0.0, 0.1),
    *(-0.8, -0.6, -0.6, -0.5),
)


class _Request:
    __slots__ = ("length", "luck", "offer", "tree")

    def __init__(self) -> None:
        self.tree = ContextTree()
        self.luck = Luck()
        self.offer: SuffixOffer | None = None
        self.length = 0


class SuffixDrafter:
    """Tree of the likeliest continuations seen in this request or in earlier responses.

    Args:
        max_tokens: bound on the shared history of responses; 0 keeps none, so that requests share nothing.
        file: where the shared history survives a restart; None keeps it in memory.
        vocab_size, identity: of the model; a file of another is refused.
    """

    name = "suffix"

    def __init__(
        self, *, vocab_size: int, identity: str, max_tokens: int = 100_000, file: str | Path | None = None
    ) -> None:
        self.calibration = Calibration(_WEIGHTS)
        self.store = ResponseStore(max_tokens, vocab_size=vocab_size, identity=identity, file=file)
        self._requests: dict[int, _Request] = {}

    def propose(self, context: Context, budget: int) -> Draft:
        request = self._follow(context)
        offer = request.offer = suffix_offer(
            request.tree, self.store.tree, budget, self.calibration.weights, request.luck.log_odds
        )
        tokens = offer.tokens
        return Draft(tokens, offer.parents, offer.chances, (self.name,) * len(tokens))

    def commit(self, context: Context, outcome: Outcome | None) -> None:  # noqa: ARG002
        self._follow(context)

    def forget(self, context: Context) -> None:
        if self._requests.pop(context.request, None) is not None:
            self.store.add(context.tokens[context.prompt_length :])

    def close(self) -> None:
        """Write the shared history to its file, if it has one."""
        self.store.save()

    def _follow(self, context: Context) -> _Request:
        request = self._requests.get(context.request)
        if request is None:
            request = self._requests[context.request] = _Request()
        if request.length != len(context.tokens):
            if (offer := request.offer) is not None:
                written = context.tokens[request.length :]
                judge(offer.guesses, offer.child, written, self.calibration, request.luck)
                request.offer = None
            request.tree.follow(context.tokens)
            request.length = len(context.tokens)
        return request
