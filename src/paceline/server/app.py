"""The routes. Each says what it does; the work is in the modules beside this one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from paceline.server import asking, chat, completions, page
from paceline.server.backend import Backend, Model
from paceline.server.failures import ApiError, from_error, plain_http
from paceline.server.feed import Feed
from paceline.server.guard import KeyGuard
from paceline.server.reference import reference
from paceline.server.reply import Choice, Reply, Wishes
from paceline.server.respond import EventStream, whole
from paceline.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorReply,
    Sampling,
    TokenizeRequest,
)
from paceline.server.settings import VERSION, Settings
from paceline.server.wire import LARGE_BYTES, StrictRoute, invalid

T = TypeVar("T")

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_STREAM = {
    "description": "The answer; with `stream`, as Server-Sent Events",
    "content": {"text/event-stream": {}},
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorReply, "description": text}
    for code, text in {
        400: "A field that cannot be served; the message says why, and what to do",
        401: "No key, or the wrong one",
        404: "No such model",
        408: "It took too long",
        413: "A body or a prompt that is too long",
        415: "A body that is not marked as JSON",
        429: "Too many requests wait; Retry-After says when to come again",
        500: "A failure of the server",
        503: "Loading, or shutting down",
    }.items()
}

router = APIRouter(route_class=StrictRoute, responses=_ERRORS)


@router.post("/v1/chat/completions", responses={200: _STREAM}, tags=["OpenAI"])
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    backend, model = _backend(request, body.model)
    job, parser, forced = await _worker(
        asking.chat_job, body, model, backend.settings.max_draft, pool=await _pool(request, body)
    )
    choices = [
        chat.Message(
            model.llm.tokenizer,
            logprobs=job.params.logprobs is not None,
            parser=parser,
            parallel=body.parallel_tool_calls is not False,
            forced=forced,
        )
        for _ in range(job.params.n)
    ]
    wishes = _wishes(body, backend, "chatcmpl", 1, job)
    reply = Reply(wishes, model.llm.tokenizer, choices, field="delta", objects=chat.OBJECTS)
    return await _answer(request, body, [job], reply)


@router.post("/v1/completions", responses={200: _STREAM}, tags=["OpenAI"])
async def text_completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one text or several."""
    backend, model = _backend(request, body.model)
    jobs, echoes = await _worker(
        asking.completion_jobs, body, model, backend.settings.max_draft, pool=await _pool(request, body)
    )
    tokenizer, params = model.llm.tokenizer, jobs[0].params
    logprobs = params.logprobs is not None
    choices: list[Choice] = [
        completions.TextChoice(tokenizer, echo=echo, logprobs=logprobs)
        for echo in echoes
        for _ in range(params.n)
    ]
    wishes = _wishes(body, backend, "cmpl", len(jobs), jobs[0])
    reply = Reply(wishes, tokenizer, choices, field="text", objects=completions.OBJECTS)
    return await _answer(request, body, jobs, reply)


@router.get("/v1/models", tags=["OpenAI"])
async def models(request: Request) -> dict[str, Any]:
    """The model, under each of its names."""
    backend, model = _backend(request, None)
    return {"object": "list", "data": [_card(name, backend, model) for name in backend.settings.names]}


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def one_model(name: str, request: Request) -> dict[str, Any]:
    """The model, if it has this name."""
    backend, model = _backend(request, name)
    return _card(name, backend, model)


@router.post("/tokenize", tags=["Paceline"])
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Token ids of a prompt or a conversation, as the model would read it."""
    _, model = _backend(request, body.model)
    ids = await _worker(asking.tokenize, body, model, pool=await _pool(request, body))
    found: dict[str, Any] = {"count": len(ids), "max_model_len": model.llm.context_limit, "tokens": ids}
    if body.return_token_strs:
        tokenizer = model.llm.tokenizer
        found["token_strs"] = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
    return found


@router.post("/detokenize", tags=["Paceline"])
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    """The text of token ids; control tokens are written out."""
    _, model = _backend(request, body.model)
    detokenized = partial(model.llm.detokenize, skip_special=False)
    return {"prompt": await _worker(detokenized, body.tokens, pool=await _pool(request, body))}


@router.get("/health", tags=["Operation"])
@router.head("/health", include_in_schema=False)
@router.api_route("/v1/health", methods=["GET", "HEAD"], include_in_schema=False)
async def health(request: Request) -> dict[str, str]:
    """Whether the model is loaded. Needs no key."""
    _ = request.app.state.backend.model
    return {"status": "ok"}


@router.get("/metrics", tags=["Operation"], response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    text = request.app.state.backend.metrics.exposition()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/version", tags=["Operation"])
async def version() -> dict[str, str]:
    """Which Paceline this is."""
    return {"version": VERSION}


def create_app(settings: Settings) -> FastAPI:
    """The application; `app.state.backend.serve` gives it its model."""
    about = "OpenAI's API, for a model that speculates"
    app = FastAPI(title="Paceline", version=VERSION, description=about, docs_url=None, redoc_url=None)
    app.openapi = partial(_document, app)  # type: ignore[method-assign]
    app.state.settings = settings
    app.state.backend = Backend(settings)
    app.include_router(router)
    app.include_router(page.router)
    app.add_api_route("/docs", reference, include_in_schema=False)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    if settings.api_key is not None:
        app.add_middleware(KeyGuard, key=settings.api_key)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, without FastAPI's own validation errors: this server never sends them."""
    document = FastAPI.openapi(app)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


def _backend(request: Request, name: str | None) -> tuple[Backend, Model]:
    backend: Backend = request.app.state.backend
    names = backend.settings.names
    model = backend.model
    if name is not None and name not in names:
        message = f"there is no model {name[:200]!r}; this server has {', '.join(names)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return backend, model


def _wishes(body: Sampling, backend: Backend, kind: str, prompts: int, job: Any) -> Wishes:
    options = body.stream_options
    if options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")
    return Wishes(
        kind=kind,
        model=body.model or backend.settings.names[0],
        prompts=prompts,
        n=job.params.n,
        predicted=job.prediction is not None,
        usage=options is not None and bool(options.include_usage),
        sources=bool(body.return_token_sources),
        stop=job.params.stop,
    )


async def _answer(request: Request, body: Sampling, jobs: Any, reply: Reply) -> Response:
    backend: Backend = request.app.state.backend
    feed = Feed(backend.metrics.observer(), whole=not body.stream)
    await _worker(feed.submit, backend.model.service, jobs)
    limits = [limit for limit in (body.timeout, backend.settings.request_timeout_s) if limit is not None]
    timeout = min(limits, default=None)
    if body.stream:
        return EventStream(feed, reply, timeout=timeout, ping_s=backend.settings.ping_s)
    return await whole(request, feed, reply, timeout=timeout)


async def _pool(request: Request, body: BaseModel) -> Executor | None:
    """Where to work on a body: what can take long must not keep the threads that all requests share."""
    slow = len(await request.body()) >= LARGE_BYTES or (isinstance(body, Sampling) and asking.compiles(body))
    return request.app.state.backend.slow if slow else None


async def _worker(function: Callable[..., T], *arguments: Any, pool: Executor | None = None) -> T:
    """Run on another thread; our errors become the client's."""
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, partial(function, *arguments))
    except Exception as error:
        told = from_error(error)
        if told.status_code == 500:
            raise
        raise told from None


def _card(name: str, backend: Backend, model: Model) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": backend.created,
        "owned_by": "paceline",
        "root": backend.settings.names[0],
        "max_model_len": model.llm.context_limit,
    }


async def _on_http_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error.response()
    assert isinstance(error, HTTPException)
    return plain_http(error.status_code, request.url.path, error.headers).response()


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return invalid(error, BODIES, request.url.path).response()
