"""The examples run, and what they claim is true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
CLAIMS = {
    "quickstart.py": "tokens per pass of the model",
    "stream.py": "FIVE",
    "edit.py": "identical: True",
    "several.py": "same alone: True",
}


def test_every_example_is_listed() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(CLAIMS)


@pytest.mark.parametrize("name", CLAIMS)
def test_an_example_keeps_its_word(name: str, smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert CLAIMS[name] in done.stdout
    assert "False" not in done.stdout
