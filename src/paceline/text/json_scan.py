"""JSON, character by character: is what came so far the beginning of a JSON value, and where in it are we?

Source of the grammar: RFC 8259.
"""

from __future__ import annotations

_SPACE = frozenset(" \t\n\r")
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {"t": "true", "f": "false", "n": "null"}

# What may follow within a number: part -> (characters, next part); parts in _WHOLE may also end it.
_NUMBER: dict[str, tuple[tuple[frozenset[str], str], ...]] = {
    "-": ((frozenset("0"), "0"), (frozenset("123456789"), "1")),
    "0": ((frozenset("."), "."), (frozenset("eE"), "e")),
    "1": ((_DIGITS, "1"), (frozenset("."), "."), (frozenset("eE"), "e")),
    ".": ((_DIGITS, ".1"),),
    ".1": ((_DIGITS, ".1"), (frozenset("eE"), "e")),
    "e": ((frozenset("+-"), "e+"), (_DIGITS, "e1")),
    "e+": ((_DIGITS, "e1"),),
    "e1": ((_DIGITS, "e1"),),
}
_WHOLE = frozenset({"0", "1", ".1", "e1"})


class JsonScanner:
    """Follows one JSON object from its opening brace.

    Attributes:
        expects: what the next character belongs to: "value", "item" (a value or the end of an empty array),
            "key", "member" (a key or the end of an empty object), "colon", "comma" (or the end of the
            container), "string", "number", "word", or "nothing" once the value is complete.
        depth: how many containers are open.
    """

    def __init__(self) -> None:
        self.expects = "value"
        self._open: list[str] = []
        self._naming = False  # the string is a key
        self._escape = 0  # characters that are still part of an escape; -1 right after the backslash
        self._rest = ""  # of a word
        self._part = ""  # of a number

    @property
    def depth(self) -> int:
        return len(self._open)

    def feed(self, char: str) -> bool:
        """Take one character; False if no JSON value goes on like that, and then nothing has changed."""
        match self.expects:
            case "string":
                return self._in_string(char)
            case "word":
                if char != self._rest[0]:
                    return False
                self._rest = self._rest[1:]
                if not self._rest:
                    self._valued()
                return True
            case "number":
                for characters, part in _NUMBER[self._part]:
                    if char in characters:
                        self._part = part
                        return True
                return self._part in _WHOLE and self._after(char)
            case "comma":
                return self._after(char)
        return char in _SPACE or self._begin(char)

    def _begin(self, char: str) -> bool:
        expects = self.expects
        if expects == "colon":
            if char != ":":
                return False
            self.expects = "value"
        elif expects in ("key", "member"):
            if char == "}" and expects == "member":
                self._close()
            elif char == '"':
                self.expects, self._naming = "string", True
            else:
                return False
        elif char == "]" and expects == "item":
            self._close()
        else:
            return expects in ("value", "item") and self._value(char)
        return True

    def _value(self, char: str) -> bool:
        if char in "{[":
            self._open.append(char)
            self.expects = "member" if char == "{" else "item"
        elif char == '"':
            self.expects, self._naming = "string", False
        elif char in _WORDS:
            self.expects, self._rest = "word", _WORDS[char][1:]
        elif char == "-" or char in _DIGITS:
            self.expects, self._part = "number", char if char in "-0" else "1"
        else:
            return False
        return True

    def _after(self, char: str) -> bool:
        """The character after a value in a container."""
        if char in _SPACE:
            self.expects = "comma"
        elif not self._open:
            return False
        elif char == ",":
            self.expects = "key" if self._open[-1] == "{" else "value"
        elif char == ("}" if self._open[-1] == "{" else "]"):
            self._close()
        else:
            return False
        return True

    def _in_string(self, char: str) -> bool:
        if self._escape == -1:
            if char not in '"\\/bfnrtu':
                return False
            self._escape = 4 if char == "u" else 0
        elif self._escape:
            if char not in _HEX:
                return False
            self._escape -= 1
        elif char == "\\":
            self._escape = -1
        elif char == '"':
            if self._naming:
                self.expects = "colon"
            else:
                self._valued()
        else:
            return char >= " "
        return True

    def _close(self) -> None:
        self._open.pop()
        self._valued()

    def _valued(self) -> None:
        self.expects = "comma" if self._open else "nothing"
