"""The process in which chat templates run. Started by `renderer`, by path; imports nothing of ours.

A template comes with a model file, so it may be hostile, and Python cannot bound one expression's
time or memory from inside. Here the kernel does: CPU time per request, address space, no new files,
no writes, no processes. Jinja's sandbox comes on top.

Requests and replies are JSON, one a line. The first request is the template's source; each later one
is the variables of one rendering. A reply has one key: "text", or the kind of failure with a message.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

CPU_SECONDS = 0.5
MEMORY_BYTES = 160 << 20  # on top of what the interpreter has mapped before a template is seen
OUTPUT_CHARS = 4 << 20


class _RefusedError(Exception):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks text for training; when rendering it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja's declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace that cannot be given names which Python itself would look up."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace attribute may not be called {name!r}")
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    made = _Namespace()
    for name, value in dict(*args, **kwargs).items():
        made[name] = value
    return made


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _refuse(message: object) -> None:
    raise _RefusedError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates are written for: the one transformers gives them."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals.update(raise_exception=_refuse, strftime_now=_strftime_now, namespace=_namespace, dict=_dict)
    return env


def _mapped_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def limit() -> None:
    """Give up, for good, what a template has no use for."""
    # Where the system has no such limit, the parent's clock still ends a rendering.
    for name, value in (
        (resource.RLIMIT_AS, _mapped_bytes() + MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (value, value))


def _import_latecomers() -> None:
    """Have everything imported that is imported at first use: soon no file can be opened."""
    with contextlib.suppress(_RefusedError):
        environment().from_string(
            "{{ lipsum(1) | striptags | urlize }}{{ strftime_now('%c') }}{{ raise_exception('') }}"
        ).render()


class _Session:
    def __init__(self) -> None:
        self._template: Any = None

    def answer(self, request: str) -> dict[str, str]:
        try:
            if self._template is None:
                self._template = environment().from_string(json.loads(request))
                return {"text": ""}
            return {"text": self._render(json.loads(request))}
        except _RefusedError as error:
            return {"refused": str(error)}
        except SecurityError as error:
            return {"hostile": f"it tried what a template may not do: {error}"}
        except MemoryError:
            return {"hostile": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
        except OverflowError as error:
            return {"hostile": f"it asks for too much: {error}"}
        except RecursionError:
            return {"hostile": "it nests or recurses too deeply"}
        except TemplateError as error:
            return {
                "failed": f"{error} (line {error.lineno})"
                if isinstance(error, TemplateSyntaxError)
                else str(error)
            }
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"}

    def _render(self, variables: dict[str, Any]) -> str:
        parts: list[str] = []
        room = OUTPUT_CHARS
        for part in self._template.generate(variables):
            room -= len(part)
            if room < 0:
                raise OverflowError(f"its output is longer than {OUTPUT_CHARS} characters")
            parts.append(part)
        return "".join(parts)


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    _import_latecomers()
    limit()
    session = _Session()
    for request in sys.stdin:
        # The default action of SIGPROF ends the process: nothing in it has to cooperate.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = session.answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
