"""What the operator of a server decides."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


def _version() -> str:
    try:
        return version("paceline")
    except PackageNotFoundError:
        return "source"


VERSION = _version()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits and manners of one server.

    Attributes:
        names: what the model is called; the first is reported, all are answered to.
        api_key: what clients must send, None for no key.
        max_queue: most requests that wait.
        max_num_seqs: most requests that run; None means the engine's own.
        request_timeout_s: most seconds of one request, None for no limit.
        max_body_bytes: largest request body.
        body_timeout_s: most seconds that a body may take to arrive; the same for a request's headers.
        cors_origins: web origins whose pages may call; none by default.
        max_draft: most draft tokens per pass that a request may ask for.
        ping_s: seconds of silence after which a stream shows that it lives.
    """

    names: tuple[str, ...]
    api_key: str | None = None
    max_queue: int = 256
    max_num_seqs: int | None = None
    request_timeout_s: float | None = None
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0
    cors_origins: tuple[str, ...] = ()
    max_draft: int = 64
    ping_s: float = 15.0
