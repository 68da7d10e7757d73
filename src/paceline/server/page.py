"""The page at `/`: files from beside this module, no build step, nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

from paceline.server.failures import plain_http

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FOLDER = files("paceline.server") / "web"
_FILES = {file.name: file.read_bytes() for file in _FOLDER.iterdir() if file.name.split(".")[-1] in _TYPES}
HEADERS = {
    # A model's text is set as text, never as markup; this holds even if that were wrong.
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def index() -> Response:
    """The page. Needs no key; what it asks for does."""
    return _file("index.html")


@router.get("/page/{name}")
async def part(name: str) -> Response:
    """A file of the page."""
    return _file(name) if name in _FILES else plain_http(404, f"/page/{name}", None).response()


def _file(name: str) -> Response:
    kind = _TYPES[name.split(".")[-1]]
    return Response(_FILES[name], headers=HEADERS, media_type=f"{kind}; charset=utf-8")
