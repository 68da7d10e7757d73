"""Fixtures that every room's tests may ask for."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import settings

from paceline.drafters import memory
from paceline.errors import PacelineError
from paceline.weights import hub

# A busy machine is no failure; whatever must end is bounded by pytest's timeout.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")

# A shell starts background jobs with Ctrl-C ignored and children inherit that: tests sending one would wait.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What drafters learn in a test must not reach the next one, nor the user's cache."""
    monkeypatch.setattr(memory, "default_file", lambda: None)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real demo model, SmolLM2-135M-Instruct in Q4_1; fetched into the user's cache once."""
    try:
        return hub.resolve("smollm2")
    except PacelineError as error:
        pytest.fail(f"the demo model cannot be had: {error}", pytrace=False)
