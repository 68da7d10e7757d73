"""File permissions mean nothing to root; tests of them step down for a moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_NOBODY = 65534


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run as nobody if running as root, so that permissions are enforced."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
