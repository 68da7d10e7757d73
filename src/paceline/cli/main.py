"""The `paceline` command: one verb per file, imported when it is called."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli import terminal

VERBS = {
    "serve": "Serve a model to any OpenAI client",
    "run": "Chat with a model in the terminal",
    "generate": "Complete one prompt",
    "demo": "Watch one prompt with and without speculation",
    "pull": "Fetch a model",
    "show": "Describe a model file",
    "plan": "Tell how much memory a model takes, before loading it",
    "bench": "Measure speeds on your prompts",
    "profile": "Measure what a pass costs on this machine",
    "check": "Check that speculation changes nothing",
    "doctor": "Report on this machine and installation",
}
ALIASES = {"collect-env": "doctor"}

OTHER_VARIABLES = {"PACELINE_CACHE", "PACELINE_ISA", "PACELINE_MODEL"}
"""Environment variables that are no option's twin."""

HELP = {"help_option_names": ["-h", "--help"]}
PLAIN: Any = {"rich_markup_mode": None, "pretty_exceptions_enable": False}


def load_verb(name: str) -> Any:
    """Import a verb's module and return its command."""
    name = ALIASES.get(name, name)
    settings = HELP | {"auto_envvar_prefix": "PACELINE"}
    verb = typer.Typer(add_completion=False, context_settings=settings, **PLAIN)
    verb.command(help=VERBS[name])(importlib.import_module(f"paceline.cli.{name}").command)
    return typer.main.get_command(verb)


class LazyGroup(TyperGroup):
    """Lists verbs without importing them, and imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=text) for name, text in VERBS.items()}
        for alias, name in ALIASES.items():
            self.commands[alias] = TyperCommand(alias, help=VERBS[name], hidden=True)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub and load_verb(str(name)), rest


app = typer.Typer(cls=LazyGroup, context_settings=HELP, **PLAIN)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            terminal.write(f"paceline {version('paceline')}\n")
        except PackageNotFoundError:
            terminal.write("paceline (run from its source)\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it")
    ] = False,
) -> None:
    """Faster text from a language model on this machine, byte for byte the same."""


def run(arguments: list[str]) -> int:
    """Run one command line; return its exit code: 0, 1 failed, 2 usage, 130 interrupted."""
    try:
        if unknown := _unknown_variable():
            terminal.note(unknown)
            return 2
        return int(app(arguments or ["--help"], prog_name="paceline", standalone_mode=False) or 0)
    except typer.TyperException as error:
        terminal.note(f"error: {error.format_message()}")
        where = getattr(getattr(error, "ctx", None), "command_path", "paceline")
        terminal.note(f"hint: `{where} --help` lists what there is")
        return error.exit_code
    except SystemExit:  # typer's own way out when a reader of --help closes the pipe
        return terminal.lost(BrokenPipeError())
    except OSError as error:
        return terminal.lost(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130


def main() -> None:
    terminal.prepare()
    sys.exit(run(sys.argv[1:]))


def _unknown_variable() -> str | None:
    """Complain about a PACELINE_ variable that nothing reads: likely a misspelt one."""
    found = {name for name in os.environ if name.startswith("PACELINE_")} - OTHER_VARIABLES
    if not found:
        return None
    parameters = (p for verb in VERBS for p in load_verb(verb).params)
    flags = {f"PACELINE_{p.name.upper()}" for p in parameters if p.param_type_name == "option"}
    for name in sorted(found - flags):
        near = difflib.get_close_matches(name, flags | OTHER_VARIABLES, n=1)
        return f"error: nothing reads {name}\nhint: " + (f"did you mean {near[0]}?" if near else "unset it")
    return None
