"""`paceline show MODEL`"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from paceline.cli import terminal
from paceline.cli.loading import locate
from paceline.cli.options import Model
from paceline.cli.verb import verb
from paceline.tools.describe import Description, describe


@verb
def command(
    model: Model,
    *,
    template: Annotated[bool, typer.Option("--template", help="Print only the chat template")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as one object")] = False,
) -> None:
    found = describe(locate(model))
    if json:
        terminal.write_json(asdict(found) | {"bits_per_weight": round(found.bits_per_weight, 3)})
    elif template:
        terminal.write((found.chat_template or "") + "\n")
    else:
        width = max(len(name) for name, _ in _lines(found))
        terminal.write("".join(f"{name:<{width}}  {value}\n" for name, value in _lines(found)))


def _window(d: Description) -> str:
    return f", {d.window_bytes_per_token} of them for the last {d.window} only" if d.window else ""


def _lines(d: Description) -> list[tuple[str, str]]:
    total = sum(d.tensor_bytes.values())
    types = ", ".join(f"{name} {size / total:.0%}" for name, size in d.tensor_bytes.items())
    return [
        ("file", f"{d.file} ({d.bytes / 1e6:.1f} MB)"),
        ("name", d.name or "not given"),
        ("licence", d.license or "not given"),
        ("architecture", d.architecture),
        ("parameters", f"{d.parameters / 1e6:.1f} million in {d.tensors} tensors"),
        ("weights", f"{total / 1e6:.1f} MB, {d.bits_per_weight:.2f} bits each: {types}"),
        ("shape", f"{d.layers} layers of width {d.width}, {d.heads} heads, {d.kv_heads} for keys and values"),
        ("context", f"{d.context_length} tokens, {d.kv_bytes_per_token} bytes of KV cache each{_window(d)}"),
        ("tokenizer", f"{f'{d.tokenizer} {d.pre_tokenizer}'.strip()}, {d.vocabulary} tokens"),
        (
            "template",
            f"{len(d.chat_template)} characters (--template prints it)" if d.chat_template else "none",
        ),
        *(("drafter", found) for found in d.drafters),
    ]
