"""Heads that were fitted to a tiny target are of use to it, and any input that is off by one shows.

What a head drafts follows from its weights, and the text from the target's alone, so every number here is the
same in every run and with every kernel set.
"""

from __future__ import annotations

import pytest

from support.fitted import FITTED, KINDS, LEAST, MISTAKES, Tiny, blind, mistakes_of


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fitted_head_is_of_use(kind: str, tiny: Tiny) -> None:
    assert tiny.kept(tiny.drafter(kind, FITTED / kind)) >= LEAST[kind]
    assert tiny.kept(blind(kind)) < 0.6 * LEAST[kind]


@pytest.mark.parametrize(("kind", "mistake"), [(kind, name) for kind in KINDS for name in mistakes_of(kind)])
def test_what_is_off_by_one_shows(kind: str, mistake: str, tiny: Tiny) -> None:
    drafter = tiny.drafter(kind, FITTED / kind)
    MISTAKES[mistake](drafter)
    assert tiny.kept(drafter) < LEAST[kind]
