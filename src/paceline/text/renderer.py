"""Runs a chat template in a process of its own, bounded in time, memory and reach."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelFileError, RequestError, ResourceError
from paceline.text.worker import Worker, out_of_time

_SCRIPT = Path(__file__).with_name("render_worker.py")
_MAX_TEMPLATE_CHARS = 1 << 20
_MAX_REQUEST_CHARS = 8 << 20
_LARGE_REQUEST_CHARS = 1 << 19  # from here on a bound that was broken is the request's fault
_START_SECONDS = 30.0
_RENDER_SECONDS = 5.0
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
        self._worker = Worker(_SCRIPT, "template")
        self._compiled = False

    def start(self) -> None:
        """Start the process without waiting for it, so that the first rendering need not."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process; a later rendering starts another."""
        self._worker.close()

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the rendered text.

        Raises RequestError for variables the template refuses or cannot render, or that are too
        many for it, ModelFileError for a template that does not compile or breaks a bound, ResourceError when
        no process can be started.
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
            self._running()
            reply = self._ask(request, _RENDER_SECONDS)
        why = reply.get("hostile")
        if why is not None and len(request) > _LARGE_REQUEST_CHARS:
            raise RequestError(
                f"the messages take {len(request)} characters, and the chat template was stopped: {why}",
                "shorten them",
            )
        return self._text(reply)

    def _running(self) -> None:
        if self._worker.start():
            self._compiled = False
            self._worker.send(json.dumps(self._source))

    def _ask(self, request: str, seconds: float) -> dict[str, str]:
        if not self._compiled:
            reply = self._receive(_START_SECONDS)
            if "text" not in reply:
                self.close()
                raise ModelFileError(
                    f"the chat template is not valid: {next(iter(reply.values()))}", _NOT_THIS_TEMPLATE
                )
            self._compiled = True
        self._worker.send(request)
        return self._receive(seconds)

    def _receive(self, seconds: float) -> dict[str, str]:
        reply = self._worker.receive(seconds)
        if isinstance(reply, dict):
            return reply
        if reply == 1 and not self._compiled:
            raise ResourceError("the template process does not start", "check that jinja2 is installed")
        return {"hostile": "it ran too long" if out_of_time(reply) else "it crashed"}

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
