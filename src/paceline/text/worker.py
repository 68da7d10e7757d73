"""A script of ours in a process of its own, for work on input that may be hostile.

The script bounds its own time and memory; whatever it does to itself, only its process ends. Requests and
replies are JSON, one a line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from paceline.errors import ResourceError

_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")


class Worker:
    """Starts the process at first use and again after it ended. Not thread-safe.

    Args:
        script: path of the script.
        purpose: what the process is called in an error.
    """

    def __init__(self, script: Path, purpose: str) -> None:
        self._script = script
        self._purpose = purpose
        self._end: weakref.finalize[Any, Any] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Have a process running, without waiting for it; True if this started one.

        Raises ResourceError if the machine has none to give.
        """
        if self.process is not None and self.process.poll() is None:
            return False
        self.close()
        self.process = _start(self._script, self._purpose)
        self._end = weakref.finalize(self, _stop, self.process, os.getpid())
        return True

    def close(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end()
        self.process = None

    def send(self, request: str) -> None:
        """Hand the running process one request, JSON text."""
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(request.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; `receive` says why

    def receive(self, seconds: float) -> dict[str, str] | int | None:
        """Return its next reply; if it ends instead, its exit status; if `seconds` pass, None.

        Without a reply the process is gone afterwards.
        """
        assert self.process is not None
        line = _line(self.process, seconds)
        if line is not None:
            reply: dict[str, str] = json.loads(line)
            return reply
        status = self.process.poll()
        self.close()
        return status


def out_of_time(status: int | None) -> bool:
    """Whether what `receive` returned instead of a reply means that the request took too long."""
    return status in (None, -signal.SIGPROF)


def _start(script: Path, purpose: str) -> subprocess.Popen[bytes]:
    # The same search path without site's start-up work; a group of its own, so that Ctrl-C is ours alone.
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    search = os.pathsep.join(path for path in sys.path if path)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-S", "-B", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=kept | {"PYTHONPATH": search, "PYTHONUTF8": "1"},
            process_group=0,
        )
    except OSError as error:
        raise ResourceError(
            f"cannot start the {purpose} process: {error}", "free memory or processes"
        ) from None


def _stop(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of ours must not end its parent's process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """Return one line of the process's output, None when it ends or the time does."""
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    data = bytearray()
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(process.stdout.fileno(), 1 << 20) if ready else b""
        if not part:
            if ready:
                process.wait()
            return None
        data += part
    return bytes(data)
