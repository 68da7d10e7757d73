"""`paceline serve [MODEL]`: an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli.config_file import read_config
from paceline.cli.generate import read_text
from paceline.cli.loading import locate
from paceline.cli.options import DEMO_MODEL, EngineFlags, Model, list_flag
from paceline.cli.verb import verb

if TYPE_CHECKING:
    from paceline.engine import LLM
    from paceline.server.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ListenFlags:
    """Where the server is, and who may come."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one")] = 8000
    served_model_name: Annotated[
        list[str],
        list_flag("--served-model-name", "--alias", help="What clients call the model; several may be given"),
    ] = field(default_factory=list)
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Key that clients must send; better given as variable")
    ] = None
    cors_origins: Annotated[
        list[str], list_flag("--cors-origins", help="Web origins whose pages may call; * for all")
    ] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How much the server takes on at a time."""

    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", "--parallel", "-np", min=1, help="Most texts written at a time")
    ] = 32
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", min=1, help="Most rows of one pass")
    ] = None
    max_queue: Annotated[int, typer.Option("--max-queue", min=0, help="Most texts that wait")] = 256
    max_draft: Annotated[
        int, typer.Option("--max-draft", min=0, max=64, help="Most draft tokens per pass of one text")
    ] = 64
    request_timeout: Annotated[
        float | None, typer.Option("--request-timeout", min=0.001, help="Most seconds of one request")
    ] = None
    max_body_bytes: Annotated[
        int, typer.Option("--max-body-bytes", min=1024, help="Largest request body")
    ] = 8 << 20


@verb
def command(
    model: Model = DEMO_MODEL,
    *,
    config: Annotated[  # noqa: ARG001  - its callback has done the work
        Path | None,
        typer.Option("--config", help="YAML with any of these flags", callback=read_config, is_eager=True),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="Jinja file to use instead of the model's template")
    ] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option("--log-level")] = "info",
    listen: ListenFlags,
    load: LoadFlags,
    engine: EngineFlags,
) -> int:
    from paceline.server.run import serve  # the web framework is imported by this verb alone

    speculate = engine.speculation()
    template = None if chat_template is None else read_text(chat_template, "--chat-template")

    def bring() -> tuple[LLM, Mapping[str, Any]]:
        from paceline.engine import LLM
        from paceline.weights.source import open_model

        file = open_model(locate(model), engine.quantize)
        if template is not None:
            file.metadata |= {"tokenizer.chat_template": template}
            file.metadata.pop("tokenizer.chat_template.tool_use", None)
        llm = LLM(
            file,
            speculate=speculate,
            threads=engine.threads,
            max_model_len=engine.max_model_len,
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.max_num_batched_tokens,
        )
        file.forget_arrays()
        return llm, file.metadata

    finished = serve(
        settings(model, listen, load), bring, host=listen.host, port=listen.port, log_level=log_level
    )
    return 0 if finished else 130


def settings(model: str, listen: ListenFlags, load: LoadFlags) -> Settings:
    """What the flags mean to the server."""
    from paceline.server.settings import Settings

    path = Path(model)
    name = path.stem if path.suffix == ".gguf" else path.name if path.is_dir() else model
    return Settings(
        names=tuple(listen.served_model_name) or (name,),
        api_key=listen.api_key,
        cors_origins=tuple(listen.cors_origins),
        max_queue=load.max_queue,
        max_num_seqs=load.max_num_seqs,
        request_timeout_s=load.request_timeout,
        max_body_bytes=load.max_body_bytes,
        max_draft=load.max_draft,
    )
