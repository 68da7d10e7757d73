"""The page on the command line names everything there is, and nothing there is not."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.cli.main import ALIASES, OTHER_VARIABLES, VERBS, load_verb

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
PARAMETERS = [p for verb in VERBS for p in load_verb(verb).params]
FLAGS = {option for p in PARAMETERS for option in (*p.opts, *p.secondary_opts) if option.startswith("-")}


def test_every_flag_is_documented_and_no_other() -> None:
    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", PAGE))
    assert named == FLAGS


def test_every_verb_is_documented() -> None:
    for verb in (*VERBS, *ALIASES):
        assert f"`{verb}" in PAGE


def test_every_variable_that_is_named_exists() -> None:
    known = {f"PACELINE_{p.name.upper()}" for p in PARAMETERS} | OTHER_VARIABLES
    named = set(re.findall(r"PACELINE_[A-Z_]+[A-Z]", PAGE))
    assert named - known == {"PACELINE_DRAFTER"}  # named as the one that does not count
    assert named >= OTHER_VARIABLES
