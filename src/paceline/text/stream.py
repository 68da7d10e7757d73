"""Token ids to text while they are being generated.

Two things are held back: bytes that do not yet form a whole character, and text that may yet turn
out to be a stop string. Stop strings are found by an Aho-Corasick automaton (Aho and Corasick 1975),
so a character costs the same however long the text and however many the stops.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Sequence

from paceline.text.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes one completion, token by token.

    The joined results of `push` and `finish` are the text of all pushed tokens, as
    `Tokenizer.decode(ids, continuing=True)` gives it, cut before the stop string that completes
    first; of two that complete at the same character, the longer. Nothing of a stop string is ever
    returned. Control tokens have no text.

    Attributes:
        stopped: the stop string that ended the text, None while none did.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._stops = _StopFinder(stop) if stop else None
        self._emitted: list[str] = []
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._emitted)

    def push(self, token: int) -> str:
        """Take the next token and return the text that is now certain; "" once stopped."""
        if self.stopped is not None or self._tokenizer.is_special(token):
            return ""
        return self._emit(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """Return what was held back: no more tokens come. An unfinished character becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        tail = self._emit(self._decoder.decode(b"", final=True))
        if self._stops is None or self.stopped is not None:
            return tail
        held = self._stops.release()
        self._emitted.append(held)
        return tail + held

    def _emit(self, text: str) -> str:
        if self._stops is not None and text:
            text, self.stopped = self._stops.push(text)
        if text:
            self._emitted.append(text)
        return text


class _StopFinder:
    """An automaton whose states are the prefixes of the stop strings, numbered from the empty one.

    Its state is always the longest prefix that the text so far ends with: exactly what to hold back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that no stop string can claim any more, and the stop string that is complete."""
        held = self._held + text
        state = self._state
        for i in range(len(self._held), len(held)):
            state = self._step(state, held[i])
            stop = self._found[state]
            if stop is not None:
                self._held = ""
                return held[: i + 1 - len(stop)], stop
        cut = len(held) - self._depth[state]
        self._state, self._held = state, held[cut:]
        return held[:cut], None

    def release(self) -> str:
        """Return the held text: nothing more follows it."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = self._next[state][char]
        self._found[state] = stop

    def _link(self) -> None:
        """Point each state at the longest proper suffix that is a prefix too, shallow states first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], char)
                queue.append(child)
            if self._found[state] is None:
                self._found[state] = self._found[self._fallback[state]]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)
