"""The page at `/docs`: every route and field, from the OpenAPI document, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import Request, Response

from paceline.server.page import HEADERS

_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Paceline: routes and fields</title>
<link rel="stylesheet" href="/page/reference.css">
<h1>Routes and fields</h1>
<p>For programs: <a href="/openapi.json">/openapi.json</a>. Types are strict; unknown fields are refused.</p>
"""


async def reference(request: Request) -> Response:
    """What the server takes, for people."""
    text = "".join(_page(request.app.openapi()))
    return Response(text, headers=HEADERS, media_type="text/html; charset=utf-8")


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    yield _HEAD
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2>{escape(method.upper())} {escape(path)}</h2>\n<p>{escape(operation['description'])}"
            if body := operation.get("requestBody"):
                yield f" Takes {_type(body['content']['application/json']['schema'])}."
            yield "</p>\n"
    for name, schema in document["components"]["schemas"].items():
        yield from _fields(name, schema)


def _fields(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f'<h2 id="{escape(name)}">{escape(name)}</h2>\n'
    yield f"<p>{escape(schema.get('description', ''))}</p>\n<table>\n"
    for field, told in schema.get("properties", {}).items():
        wanted = " (required)" if field in schema.get("required", ()) else ""
        what = " ".join(filter(None, (escape(told.get("description", "")), _range(told))))
        yield f"<tr><th>{escape(field)}<td>{_type(told)}{wanted}<td>{what}\n"
    yield "</table>\n"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "const" in schema or "enum" in schema:
        return " or ".join(escape(repr(one)) for one in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(schema.get("type", "anything"))


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is None or high is None:
        return ""
    return f"({'above' if 'exclusiveMinimum' in schema else 'from'} {low:.20g} to {high:.20g})"
