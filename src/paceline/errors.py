"""Everything a user can cause. Each error carries one message and one hint: the next step.

A message names the value and the limit it broke. `assert` elsewhere in the package means a bug of
ours; anything that a prompt, a file, a flag or a machine can cause is raised from here.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors meant for users.

    Args:
        message: what is wrong, with the value and the limit.
        hint: what to do next; shown on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(PacelineError):
    """A flag, option or argument that cannot mean anything; exit code 2."""

    exit_code = 2


class ModelFileError(PacelineError):
    """A model file that is damaged, truncated or hostile."""


class UnsupportedModelError(PacelineError):
    """A sound model file that asks for something Paceline does not have; names it."""


class RequestError(PacelineError):
    """A request that cannot be served as asked: prompt too long, bad sampling value, bad template input."""


class PromptTooLongError(RequestError):
    """A prompt that leaves no room for an answer.

    Attributes:
        tokens: of the prompt.
        limit: most tokens of prompt and output together.

    Args:
        least: `tokens` is what the text must come to at least; it was not encoded.
    """

    def __init__(self, tokens: int, limit: int, *, least: bool = False) -> None:
        count = f"at least {tokens}" if least else f"{tokens}"
        super().__init__(
            f"the prompt has {count} tokens; the context limit is {limit}, output included",
            f"shorten the prompt to {limit - 1} tokens or raise max_model_len",
        )
        self.tokens = tokens
        self.limit = limit


class QueueFullError(RequestError):
    """Too many requests wait already.

    Attributes:
        waiting: requests that have not started.
        limit: most that may wait.
    """

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(f"{waiting} requests wait already; the limit is {limit}", "try again later")
        self.waiting = waiting
        self.limit = limit


class ResourceError(PacelineError):
    """The machine cannot do it: memory, disk, CPU features, network."""


class ShuttingDownError(ResourceError):
    """A request that came after the end was announced."""

    def __init__(self) -> None:
        super().__init__("no more requests are taken: shutting down", "ask again when it is back")


def suggest(word: str, known: list[str]) -> str:
    """Return a hint that offers the nearest of `known` to a misspelt `word`."""
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
