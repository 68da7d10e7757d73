"""Everything that can go wrong with a request, in the shape of OpenAI's errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Response

from paceline.errors import (
    ModelFileError,
    PacelineError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    ResourceError,
    ShuttingDownError,
)

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
RETRY_AFTER_S = 1


class ApiError(HTTPException):
    """An error that is sent to the client.

    Args:
        status: HTTP status.
        message: what is wrong, with the value, the limit and the next step.
        param: the field at fault.
        code: a word for programs.
        headers: more response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients understand."""
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        content = json.dumps(self.body())  # in ASCII: a message may quote half a surrogate pair
        return Response(content, self.status_code, self.headers, "application/json")


def from_error(error: BaseException) -> ApiError:
    """What to tell a client about an exception of ours; anything unexpected is a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if not isinstance(error, PacelineError):
        return ApiError(500, "the server failed on this request; its log says why", code="internal_error")
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    if isinstance(error, PromptTooLongError):
        return ApiError(413, message, code="context_length_exceeded")
    if isinstance(error, QueueFullError):
        return ApiError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, ShuttingDownError):
        return ApiError(503, message, code="shutting_down")
    if isinstance(error, ResourceError):
        return ApiError(503, message, code="out_of_resources")
    if isinstance(error, ModelFileError):
        return ApiError(500, message, code="model_file")
    return ApiError(400, message, code="invalid_value" if isinstance(error, RequestError) else None)


def client_gone() -> ApiError:
    """For the log and the metrics alone: nobody is there to read it."""
    return ApiError(499, "the client went away")


def plain_http(status: int, path: str, headers: Mapping[str, str] | None) -> ApiError:
    """An error that the web framework found: no such route, wrong method."""
    words = {
        404: f"there is no route {path}; /docs lists what there is",
        405: f"{path} does not take this method; /docs says which it takes",
    }
    return ApiError(status, words.get(status, HTTPStatus(status).phrase), headers=headers)
