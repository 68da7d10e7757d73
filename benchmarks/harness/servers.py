"""Servers to measure, each in a process of its own."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.errors import ResourceError
from paceline.tools.peer_client import PeerError, Server

START_S = 120.0
STOP_S = 20.0


class ServerProcess:
    """An OpenAI-compatible server that this process started, and stops.

    Args:
        command: what to run; {port} in it becomes a free port.
        log: file for what it prints.

    Raises:
        RuntimeError: it ended, or was not ready within two minutes; with the end of its log.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.command = [
            word.replace("{port}", str(_free_port())) if "{port}" in word else word for word in command
        ]
        port = next(word for asked, word in zip(command, self.command, strict=True) if "{port}" in asked)
        self.port = int(port)
        self._log = log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(self.command, stdout=sink, stderr=subprocess.STDOUT)
        try:
            self.client = self._ready()
        except BaseException:
            self.close()
            raise

    @property
    def shown(self) -> str:
        """The command line without what only this machine has."""
        return " ".join(Path(word).name if word.startswith("/") else word for word in self.command)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def resident_bytes(self) -> int:
        """Memory of the process and of those it started (Linux)."""
        pages = 0
        for pid in _family(self._process.pid):
            try:
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue  # it has just ended
        return pages * os.sysconf("SC_PAGE_SIZE")

    def log_tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-1500:]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ready(self) -> Server:
        url = f"http://127.0.0.1:{self.port}"
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.alive:
            try:
                server = Server(url, self.name)
                server.get("/health")
                return server
            except (ResourceError, PeerError, OSError, http.client.HTTPException):
                time.sleep(0.1)
        raise RuntimeError(f"{self.name} did not start:\n{self.log_tail()}")


def paceline(
    model: Path, speculate: str, *, threads: int, context: int, log: Path, more: Sequence[str] = ()
) -> ServerProcess:
    """`paceline serve`, as installed in this Python."""
    command = [
        *(sys.executable, "-m", "paceline", "serve", str(model), "--port", "{port}"),
        *("--speculate", speculate, "--threads", str(threads), "--max-model-len", str(context), *more),
    ]
    return ServerProcess(f"paceline {speculate}", command, log)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        try:
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
            found += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found
