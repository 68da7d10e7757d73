"""Runs a chat template in a process of its own, bounded in time, memory and reach."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelFileError, RequestError, ResourceError

_WORKER = Path(__file__).with_name("render_worker.py")
_MAX_TEMPLATE_CHARS = 1 << 20
_MAX_REQUEST_CHARS = 8 << 20
_START_SECONDS = 30.0
_RENDER_SECONDS = 5.0
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
_NOT_THIS_TEMPLATE = "use another file of this model, or give the prompt as text"


class Renderer:
    """One template and the process that renders it, which starts at first use and is kept.

    A rendering may take half a second of CPU time, 160 MiB of memory and 4 Mi characters of output; then the
    process ends, and the next rendering starts another. Safe to call from several threads.
    """

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_TEMPLATE_CHARS:
            raise ModelFileError(
                f"the chat template has {len(source)} characters, more than {_MAX_TEMPLATE_CHARS}",
                _NOT_THIS_TEMPLATE,
            )
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._compiled = False
        self._end: weakref.finalize[Any, Any] | None = None

    def start(self) -> None:
        """Start the process without waiting for it, so that the first rendering need not."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process; a later rendering starts another."""
        if self._end is not None:
            self._end()
        self._process = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the rendered text.

        Raises RequestError for variables the template refuses or cannot render, ModelFileError for a
        template that does not compile or breaks a bound, ResourceError when no process can be started.
        """
        try:
            request = json.dumps(variables)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"the messages hold what JSON cannot: {error}", "pass strings, numbers, lists and dicts"
            ) from None
        if len(request) > _MAX_REQUEST_CHARS:
            raise RequestError(
                f"the messages take {len(request)} characters, more than {_MAX_REQUEST_CHARS}",
                "shorten them",
            )
        with self._lock:
            reply = self._ask(self._running(), request, _RENDER_SECONDS)
        return self._text(reply)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start()
            self._end = weakref.finalize(self, _stop, self._process, os.getpid())
            self._compiled = False
            _send(self._process, json.dumps(self._source))
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], request: str, seconds: float) -> dict[str, str]:
        if not self._compiled:
            reply = self._receive(process, _START_SECONDS)
            if "text" not in reply:
                self.close()
                raise ModelFileError(
                    f"the chat template is not valid: {next(iter(reply.values()))}", _NOT_THIS_TEMPLATE
                )
            self._compiled = True
        _send(process, request)
        return self._receive(process, seconds)

    def _receive(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, str]:
        line = _line(process, seconds)
        if line is not None:
            reply: dict[str, str] = json.loads(line)
            return reply
        status = process.poll()
        self.close()
        if status == 1 and not self._compiled:
            raise ResourceError("the template process does not start", "check that jinja2 is installed")
        return {"hostile": "it ran too long" if status in (None, -signal.SIGPROF) else "it crashed"}

    def _text(self, reply: dict[str, str]) -> str:
        if "refused" in reply:
            raise RequestError(
                f"the chat template refuses these messages: {reply['refused']}", "change the messages"
            )
        if "hostile" in reply:
            raise ModelFileError(f"the chat template was stopped: {reply['hostile']}", _NOT_THIS_TEMPLATE)
        if "failed" in reply:
            raise RequestError(
                f"the chat template cannot render these messages: {reply['failed']}",
                "check the roles and fields that this model's template expects",
            )
        return reply["text"]


def _start() -> subprocess.Popen[bytes]:
    # The same search path without site's start-up work; a group of its own, so that Ctrl-C is ours alone.
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    search = os.pathsep.join(path for path in sys.path if path)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-S", "-B", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=kept | {"PYTHONPATH": search, "PYTHONUTF8": "1"},
            process_group=0,
        )
    except OSError as error:
        raise ResourceError(
            f"cannot start the template process: {error}", "free memory or processes"
        ) from None


def _stop(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of ours must not end its parent's process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _send(process: subprocess.Popen[bytes], request: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(request.encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended; `_receive` says why


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
