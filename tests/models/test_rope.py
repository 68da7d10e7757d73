"""How fast each pair turns, worked out by hand; whole models are compared elsewhere."""

from __future__ import annotations

import math

import pytest

from paceline.models.rope import Rope

PLAIN = Rope(base=10000.0, dim=32).frequencies(4096)


def test_plain() -> None:
    assert Rope(base=10000.0, dim=32).frequencies(1) == [10000.0 ** (-i / 16) for i in range(16)]


def test_divisors_come_first() -> None:
    divisors = [1.0 + i for i in range(16)]
    got = Rope(base=10000.0, dim=32, kind="linear", factor=2.0).frequencies(4096, divisors)
    assert got == [f / by / 2 for f, by in zip(PLAIN, divisors, strict=True)]


def test_dynamic_scaling_takes_the_longest_text_there_can_be() -> None:
    rope = Rope(base=10000.0, dim=32, kind="dynamic", factor=2.0, original=1024)
    assert rope.frequencies(1024) == PLAIN
    assert rope.frequencies(100) == PLAIN
    base = 10000.0 * (2 * 4 - 1) ** (32 / 30)
    assert rope.frequencies(4096) == [base ** (-i / 16) for i in range(16)]


def test_yarn_keeps_fast_pairs_and_slows_down_slow_ones() -> None:
    rope = Rope(base=10000.0, dim=32, kind="yarn", factor=4.0, original=1024)
    got = [f / plain for f, plain in zip(rope.frequencies(4096), PLAIN, strict=True)]
    # 1024 positions are 32 turns at pair 2.83 and one turn at pair 8.85.
    assert got[:3] == [1.0, 1.0, 1.0]
    assert got[9:] == [0.25] * 7
    assert got[3:9] == pytest.approx([1 - 0.75 * i / 7 for i in range(1, 7)])
    assert rope.scale == 1.0 + 0.1 * math.log(4.0)
    assert Rope(base=10000.0, dim=32, kind="yarn", factor=0.5, original=1024).scale == 1.0


def test_long_rope_grows_louder_with_its_factor() -> None:
    rope = Rope(base=10000.0, dim=32, kind="longrope", factor=32.0, original=4096)
    assert rope.scale == math.sqrt(1 + 5 / 12)
    assert Rope(base=10000.0, dim=32, kind="longrope", factor=32.0, original=4096, magnitude=1.5).scale == 1.5
