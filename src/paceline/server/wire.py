"""Request bodies: read within bounds of size and time, parsed strictly, refused in plain words."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from paceline.errors import suggest
from paceline.server.failures import ApiError, client_gone, from_error
from paceline.server.schema import REFUSED

_log = logging.getLogger("paceline.server")

_SHOWN_CHARACTERS = 80
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # or a whole one
_EXACT = 2**53  # below it every whole number is a float of its own
_MOST_LEVELS = 64  # more than any schema or message needs; what reads them calls itself
_MOST_FIELDS = 1 << 16  # of one object; each may be a fault to report
LARGE_BYTES = 1 << 17
"""A body from here on is worked on by the threads that are kept for what takes long."""


class BoundedRequest(Request):
    """A request whose body is limited to `state.max_body_bytes`, and to `state.body_timeout_s` of waiting."""

    async def body(self) -> bytes:
        if not hasattr(self, "_bytes"):
            limit = self.app.state.settings.max_body_bytes
            declared = self.headers.get("content-length", "")
            if declared.isdecimal() and int(declared) > limit:
                raise _too_large(int(declared), limit)
            try:
                async with asyncio.timeout(self.app.state.settings.body_timeout_s):
                    self._bytes = await self._collect(limit)
            except TimeoutError:
                raise ApiError(408, "the body did not arrive in time", code="body_timeout") from None
        return self._bytes

    async def json(self) -> Any:
        data = await self.body()
        if len(data) < LARGE_BYTES:
            return parse_json(data)
        pool = self.app.state.backend.slow
        return await asyncio.get_running_loop().run_in_executor(pool, parse_json, data)

    async def _collect(self, limit: int) -> bytes:
        data = bytearray()
        try:
            async for part in self.stream():
                data += part
                if len(data) > limit:
                    raise _too_large(len(data), limit)
        except ClientDisconnect:
            raise client_gone() from None
        return bytes(data)


class StrictRoute(APIRoute):
    """A route that reads its body as `BoundedRequest` does, and answers a failure of ours with a 500."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            try:
                return await handler(BoundedRequest(request.scope, request.receive))
            except (HTTPException, RequestValidationError):
                raise
            except Exception as error:
                _log.exception("a request failed")
                return from_error(error).response()

        return bounded


def _too_large(size: int, limit: int) -> ApiError:
    message = f"the body has {size} bytes or more; the limit is {limit}; raise --max-body-bytes"
    return ApiError(413, message, code="body_too_large")


def parse_json(data: bytes) -> Any:
    """Parse JSON as RFC 8259 has it: UTF-8, finite numbers, and not deep.

    Raises:
        ApiError: 400.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_float=_finite, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise _bad_json(f"it is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _bad_json(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _bad_json(f"it is nested deeper than {_MOST_LEVELS} levels") from None
    except ValueError as error:  # a number of thousands of digits, or one that is none
        raise _bad_json(str(error).partition(":")[0]) from None
    _refuse_excess(value)
    if _HALF_PAIR.search(data):
        _refuse_half_pairs(value)
    return value


def _refuse_excess(value: object) -> None:
    level: list[Any] = [value]
    for _ in range(_MOST_LEVELS + 1):
        fields = max((len(one) for one in level if isinstance(one, dict)), default=0)
        if fields > _MOST_FIELDS:
            message = f"an object in the body has {fields} fields; the limit is {_MOST_FIELDS}"
            raise ApiError(400, message, code="invalid_value")
        inside = [one.values() if isinstance(one, dict) else one for one in level if _is_container(one)]
        level = [child for children in inside for child in children]
        if not level:
            return
    raise _bad_json(f"it is nested deeper than {_MOST_LEVELS} levels")


def _is_container(value: object) -> TypeGuard[dict[str, Any] | list[Any]]:
    return isinstance(value, dict | list)


def _refuse_half_pairs(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad_json("a string holds half of a surrogate pair, which is no text") from None


def _bad_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


def _finite(text: str) -> float:
    """A number with a point; JSON knows one kind of numbers, so 20.0 is as whole as 20."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is beyond what a number can hold")
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def shown(value: object) -> str:
    """A value as an error message quotes it."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def invalid(error: RequestValidationError, bodies: Mapping[str, type[BaseModel]], path: str) -> ApiError:
    """Turn what pydantic found into one error that names the field and the way out.

    Args:
        bodies: path of each route to the class of its body.
    """
    found: Sequence[Mapping[str, Any]] = error.errors()
    first = found[0]
    place = [part for part in first["loc"][1:] if not _is_branch(part)]
    if not place:
        return _no_body(first)
    field = str(place[0])
    if first["type"] == "extra_forbidden":
        return _unknown(place, bodies.get(path))
    if first["type"] == "missing":
        message = f"{_dotted(place)} is missing"
        return ApiError(400, message, param=_dotted(place), code="missing_required_parameter")
    same = [e for e in found if len(e["loc"]) > 1 and str(e["loc"][1]) == field]
    wanted = dict.fromkeys(e["msg"].removeprefix("Input should be ") for e in same if e["type"] != "missing")
    message = f"{_dotted(place)} is {shown(first['input'])}; it should be {', or '.join(wanted)}"
    return ApiError(400, message, param=_dotted(place), code="invalid_type")


def _no_body(error: Mapping[str, Any]) -> ApiError:
    if isinstance(error["input"], bytes):
        message = "the body is not marked as JSON; send the header `Content-Type: application/json`"
        return ApiError(415, message, code="unsupported_media_type")
    if error["type"] == "missing":
        return ApiError(400, "the body is missing; send a JSON object", code="invalid_json")
    return ApiError(400, f"the body is {shown(error['input'])}; send a JSON object", code="invalid_json")


def _unknown(place: Sequence[object], body: type[BaseModel] | None) -> ApiError:
    name = str(place[-1])
    if len(place) == 1 and name in REFUSED:
        message = f"{shown(name)} is not supported; {REFUSED[name]}"
    else:
        known = [] if body is None or len(place) > 1 else list(body.model_fields)
        near = f"; {suggest(name[:64], known)}" if known else ""
        message = f"unknown field {shown(_dotted(place))}{near}"
    return ApiError(400, message, param=_dotted(place)[:_SHOWN_CHARACTERS], code="unknown_parameter")


def _is_branch(part: object) -> bool:
    """pydantic names the branch of a union in a place: `str`, `list[str]`, `ToolChoice`."""
    return isinstance(part, str) and (
        part in ("str", "int", "float", "bool", "dict[str,any]", "literal")
        or part.startswith(("list[", "function-", "constrained-", "literal["))
        or part == "ToolChoice"
    )


def _dotted(place: Iterable[object]) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
