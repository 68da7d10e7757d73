"""What drafters that cost time of their own have won and lost, and so whether they are asked.

All in plain tokens: the time that a token takes without drafts. A drafter weighs each pass of its own
against what it hopes to gain; these purses bound what is lost when its hopes are wrong. One is filled by
all requests together, one belongs to each request, and a drafter is asked while neither is empty. One that
declines is left alone for a while, since asking costs time too and answers change slowly.
"""

from __future__ import annotations


class Purse:
    """Winnings less costs.

    Args:
        start: what may be lost before anything was won.
        most: winnings beyond this are not kept.
    """

    __slots__ = ("_most", "balance")

    ALLOWANCE = 0.003
    """Added with every token, so that a loser gets another chance."""

    def __init__(self, start: float, most: float) -> None:
        self.balance = start
        self._most = most

    def add(self, tokens: float) -> None:
        self.balance = min(self.balance + tokens, self._most)


class _Customer(Purse):
    """One request: its purse, and how long the drafter is left alone after it declined.

    Attributes:
        wait: steps to come without asking.
        patience: steps that the next refusal costs.
    """

    __slots__ = ("patience", "wait")

    def __init__(self, start: float, most: float) -> None:
        super().__init__(start, most)
        self.wait = 0
        self.patience = 1


class Venture:
    """One drafter, over all requests.

    Attributes:
        probes: saved up for asking although nothing is hoped for or a purse is empty, which is how hopes get
            better and bad luck ends.
        least: what the cheapest probe took when it was last too dear.
    """

    START, MOST = 6.0, 24.0
    START_EACH, MOST_EACH = 3.0, 8.0

    PROBES = 0.004
    MOST_PROBES = 2.5

    MOST_PATIENCE = 16

    def __init__(self) -> None:
        self.probes = 0.0
        self.least = 0.0
        self._all = Purse(self.START, self.MOST)
        self._each: dict[int, _Customer] = {}

    @property
    def may_probe(self) -> bool:
        """Whether more is saved up than the cheapest probe took when it was last too dear."""
        return self.probes > self.least

    def may_ask(self, request: int) -> bool:
        """Called once per step and request."""
        customer = self._each.get(request)
        if customer is None:
            customer = self._each[request] = _Customer(self.START_EACH, self.MOST_EACH)
            self.least = 0.0  # it may be cheaper to probe for
        for one in (customer, self._all):
            one.add(Purse.ALLOWANCE)
        self.probes = min(self.probes + self.PROBES, self.MOST_PROBES)
        if customer.wait > 0:
            customer.wait -= 1
            return False
        return customer.balance > 0.0 and self._all.balance > 0.0

    def answered(self, request: int, drafted: bool) -> None:
        """The drafter was asked for this request, and had something or not."""
        if customer := self._each.get(request):
            if drafted:
                customer.wait, customer.patience = 0, 1
            else:
                customer.wait = customer.patience
                customer.patience = min(2 * customer.patience, self.MOST_PATIENCE)

    def settle(self, request: int, tokens: float) -> None:
        """Pay in what was won, or out what was spent."""
        self._all.add(tokens)
        if purse := self._each.get(request):
            purse.add(tokens)

    def forget(self, request: int) -> None:
        self._each.pop(request, None)
