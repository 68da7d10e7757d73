"""A text that the caller expects the answer to resemble, such as the file that is to be edited.

The drafter walks along it while the target writes the same. Where they part it looks for the place where
they meet again; until that is found it guesses that the target left something out, put something in, or
wrote something else of the same length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from paceline.core import ROOT, Context, Draft, Outcome
from paceline.drafters.calibration import LENGTH_CLASSES, Calibration, Features, Luck, length_class
from paceline.drafters.offer import Offer

# Layout of the features: how the position was found, then the length matched before it.
_FOLLOWED, _INSERTED, _REPLACED = 0, 1, 2
_LENGTH = 3
_WEIGHTS = (0.6, -0.6, -0.9, *(-0.6, -0.6, 0.0, 0.4, 0.8, 1.0, 1.4, 1.8, 2.4, 3.0))
assert len(_WEIGHTS) == _LENGTH + LENGTH_CLASSES

_NEAR = 16
"""A single matching token counts only this close ahead; it is chance further away."""
_LOOK_AHEAD, _LOOK_BACK, _ENOUGH = 12, 4, 8


class _Request:
    """Where one request stands in its prediction.

    Attributes:
        at: index of the predicted token that comes next, while followed.
        matched: how many tokens before `at` agree with the text.
        lost: tokens written since text and prediction parted at `at`; 0 while followed.
    """

    def __init__(self, prediction: Sequence[int], start: int) -> None:
        self.prediction = list(prediction)
        self.positions: dict[int, list[int]] = {}
        for i, token in enumerate(self.prediction):
            self.positions.setdefault(token, []).append(i)
        self.luck = Luck()
        self.offer = Offer()
        self.length = start
        self.at = self.matched = self.lost = 0

    def follow(self, tokens: list[int]) -> None:
        prediction = self.prediction
        for i in range(self.length, len(tokens)):
            if not self.lost and self.at < len(prediction) and prediction[self.at] == tokens[i]:
                self.at += 1
                self.matched += 1
            else:
                self._find(tokens, i)
        self.length = len(tokens)

    def _find(self, tokens: list[int], last: int) -> None:
        """Look near `at` for the longest match that ends with tokens[last]; the nearest ahead wins ties."""
        places = self.positions.get(tokens[last], [])
        ahead = bisect_left(places, self.at)
        best, where = 0, -1
        behind = places[max(0, ahead - _LOOK_BACK) : ahead]
        for place in [*places[ahead : ahead + _LOOK_AHEAD], *reversed(behind)]:
            length = 1
            limit = min(_ENOUGH, place + 1, last + 1)
            while length < limit and self.prediction[place - length] == tokens[last - length]:
                length += 1
            near = 0 <= place - self.at < _NEAR
            if length > best and (length > 1 or near):
                best, where = length, place
        if best:
            self.at, self.matched, self.lost = where + 1, best, 0
        else:
            self.lost += 1


class PredictionDrafter:
    """Chain along `Context.prediction`, or two short ways back to it after the text left it.

    Args:
        vocab_size: a prediction is cut at the first id outside the vocabulary.
    """

    name = "prediction"

    def __init__(self, *, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.calibration = Calibration(_WEIGHTS)
        self._requests: dict[int, _Request] = {}

    def serves(self, context: Context) -> bool:
        """Whether there can be anything to offer this request."""
        return len(context.prediction) > 0

    def propose(self, context: Context, budget: int) -> Draft:
        if not len(context.prediction):
            return Draft.empty()
        request = self._follow(context)
        offer = request.offer = Offer()
        at = request.at
        if not request.lost:
            self._chain(request, at, budget, _FOLLOWED)
            return offer.draft(self.name)
        self._chain(request, at, (budget + 1) // 2, _INSERTED)
        self._chain(request, at + request.lost, budget - len(offer.tokens), _REPLACED)
        return offer.draft(self.name)

    def commit(self, context: Context, outcome: Outcome | None) -> None:  # noqa: ARG002
        if len(context.prediction):
            self._follow(context)

    def forget(self, context: Context) -> None:
        self._requests.pop(context.request, None)

    def _chain(self, request: _Request, at: int, budget: int, found: int) -> None:
        """Offer what the prediction says from `at` on, unless its first token is already offered."""
        offer, luck = request.offer, request.luck.log_odds
        node, left = ROOT, 1.0
        siblings = offer.guesses.get(ROOT, ())
        for _, chance, _ in siblings:
            left -= left * chance
        chain = request.prediction[at : at + budget]
        if not chain or any(chain[0] == guess for guess, _, _ in siblings):
            return
        for depth, token in enumerate(chain):
            features: Features = (found, _LENGTH + length_class(request.matched * (not request.lost) + depth))
            chance = self.calibration.chance(features, luck)
            offer.guesses[node] = [*offer.guesses.get(node, ()), (token, chance, features)]
            node = offer.add(node, token, chance * left)
            left = 1.0

    def _follow(self, context: Context) -> _Request:
        request = self._requests.get(context.request)
        if request is None:
            request = _Request(self._valid(context.prediction), context.prompt_length)
            self._requests[context.request] = request
        if request.length != len(context.tokens):
            request.offer.learn(context.tokens[request.length :], self.calibration, request.luck)
            request.offer = Offer()
            request.follow(context.tokens)
        return request

    def _valid(self, prediction: Sequence[int]) -> Sequence[int]:
        for i, token in enumerate(prediction):
            if not 0 <= token < self.vocab_size:
                return prediction[:i]
        return prediction
