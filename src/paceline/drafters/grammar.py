"""What a constraint leaves no choice about: the tokens that have to follow, a draft that cannot fail."""

from __future__ import annotations

from paceline.core import Context, Draft, Outcome


class GrammarDrafter:
    """Chain of the tokens that `Context.constraint` forces. Nothing to learn: they are certain."""

    name = "grammar"

    def serves(self, context: Context) -> bool:
        """Whether there can be anything to offer this request."""
        return context.constraint is not None

    def propose(self, context: Context, budget: int) -> Draft:
        if context.constraint is None or budget <= 0:
            return Draft.empty()
        forced = context.constraint.forced()[:budget]
        return Draft.chain(forced, [1.0] * len(forced), self.name)

    def commit(self, context: Context, outcome: Outcome | None) -> None:
        """The constraint itself follows the text."""

    def forget(self, context: Context) -> None:
        """Nothing is kept."""
