"""What drafters may cost and drafts may lose before they have proved themselves.

An account for each request and drafter that costs next to nothing, in seconds; see `venture` for the others.
Trust in each drafter's chances. A stake for each request, in plain tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class Account:
    """Whether asking one drafter for one request has paid, in seconds.

    Each step puts a small allowance in, each question takes its cost out, and what is bought pays in the
    time it is expected to save. A drafter is asked while it can pay; one that stops being useful is soon
    asked only as often as the allowance covers, which is how it gets another chance.
    """

    __slots__ = ("balance", "cost")

    ALLOWANCE = 0.004
    """Share of a plain token's time that unpaid questions may take in the long run."""

    QUESTIONS = 12.0
    """Credit at the start, and at most, in questions."""

    def __init__(self) -> None:
        self.cost = 0.0
        self.balance = 0.0

    def may_ask(self, token: float) -> bool:
        self.balance += self.ALLOWANCE * token
        return self.balance >= 0.0

    def asked(self, seconds: float) -> None:
        if self.cost == 0.0:
            self.cost = seconds
            self.balance += self.QUESTIONS * seconds
        # The running minimum with a slow rise: a question interrupted by another process is no dearer.
        self.cost = min(seconds, self.cost * 1.05)
        self.balance -= self.cost

    def earn(self, seconds: float) -> None:
        self.balance = min(self.balance + seconds, self.QUESTIONS * self.cost)


class Trust:
    """What a drafter's claims are worth: guesses that came true over guesses that should have.

    The drafters calibrate themselves; this bounds the harm of one that does not. Never above one.
    """

    __slots__ = ("claimed", "factor", "true")

    DOUBT = 4.0
    FADE = 0.995

    def __init__(self) -> None:
        self.claimed = self.true = 0.0
        self.factor = 1.0

    def record(self, chance: float, hit: bool) -> None:
        self.claimed = self.FADE * self.claimed + chance
        self.true = self.FADE * self.true + hit
        self.factor = min(1.0, (self.true + self.DOUBT) / (self.claimed + self.DOUBT))


class Stake:
    """What one request has won by its drafts so far, in plain tokens; it may lose only so much.

    Chances are averages over many texts; on the one at hand they may be wrong for as long as it lasts. So
    a request starts with a small stake, adds a little each step, and risks no more than it has: the price
    of a draft times the chance that it fails altogether. Drafts that risk next to nothing, in themselves or
    beside what they promise, always pass.
    """

    __slots__ = ("balance", "paid")

    START = 0.08
    ALLOWANCE = 0.003
    MOST = 4.0
    TRIFLE = 0.02
    BARGAIN = 0.05

    def __init__(self) -> None:
        self.balance = self.START
        self.paid = 0.0

    def afford(self, prices: Sequence[float], misses: Sequence[float], gains: Sequence[float]) -> int:
        """How many nodes to take.

        Args:
            prices: [n] what the first 1, 2, ... of them cost together.
            misses: [n] chance that all of these fail.
            gains: [n] tokens expected of these.
        """
        least = max(self.balance, self.TRIFLE)
        for n in range(len(prices), 0, -1):
            price = prices[n - 1]
            if price * misses[n - 1] <= max(least, self.BARGAIN * (gains[n - 1] - price)):
                self.paid = price
                return n
        return 0

    def settle(self, accepted: int) -> None:
        """End a step that won `accepted` tokens for what was paid."""
        self.balance = min(self.balance + self.ALLOWANCE + accepted - self.paid, self.MOST)
        self.paid = 0.0
