"""One prompt plain and with speculation, side by side, in fair time on one machine.

Running both at once would make each slow the other. So they take turns, and the one whose own clock is
behind goes next: what the viewer sees is the race of two machines, and each clock is measured alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from paceline.core import Completion
from paceline.engine import Chunk

PROMPT = """Add a docstring to every function below and print the whole file again.

```python
def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return width * height


def perimeter(width, height):
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return 2 * (width + height)


def volume(width, height, depth):
    if width < 0 or height < 0 or depth < 0:
        raise ValueError("sides must not be negative")
    return area(width, height) * depth
```"""


@dataclass(slots=True)
class Lane:
    """One side of the race.

    Attributes:
        clock: seconds this side has computed, prefill included.
        pieces: (text of a step, whether any of its tokens was a draft that the target took) in order.
        tokens: so far; `result` once it is over.
    """

    name: str
    clock: float = 0.0
    first: float | None = None
    tokens: int = 0
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    result: Completion | None = None

    @property
    def tokens_per_s(self) -> float:
        """Decode speed so far: tokens after the first step over the seconds since."""
        seconds = self.clock - (self.first if self.first is not None else self.clock)
        return max(self.tokens - 1, 0) / seconds if seconds > 0 else 0.0

    def take(self, chunk: Chunk, seconds: float) -> None:
        self.clock += seconds
        self.first = self.clock if self.first is None else self.first
        self.tokens += len(chunk.tokens)
        self.pieces.append((chunk.text, any(chunk.sources)))
        self.result = chunk.completion or self.result


def race(lanes: Mapping[str, Iterator[Chunk]]) -> Iterator[list[Lane]]:
    """Run the streams of chunks against each other; yields the lanes after every step of one of them."""
    state = [Lane(name) for name in lanes]
    running = dict(zip(lanes, state, strict=True))
    while running:
        name = min(running, key=lambda n: running[n].clock)
        started = time.perf_counter()
        chunk = next(lanes[name], None)
        seconds = time.perf_counter() - started
        if chunk is None:
            del running[name]
            continue
        running[name].take(chunk, seconds)
        yield state
