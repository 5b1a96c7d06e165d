"""Completion of the command line by the shell: typer's own, for all commands and for the options of a run.

A shell asks on each press of the tab key, so torch is not imported, and nothing of this when a script is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from ttprun.cli.commands import COMMANDS, LAUNCHING
from ttprun.cli.options import FLAGS
from ttprun.config import Config
from ttprun.config_sources import FILE_ONLY, OF_TORCHRUN, option_name


def build_app() -> typer.Typer:
    """One typer app with every command, which `ttprun` itself never runs: it imports one command alone."""
    app = typer.Typer(add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(_options_of_a_run())
    app.command("run")(_options_of_a_run())
    for name, (module, function) in COMMANDS.items():
        command = _options_of_a_run() if name in LAUNCHING else getattr(import_module(module), function)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _options_of_a_run() -> Callable[..., None]:
    """A function whose signature has torchrun's options and ours, without their values' types and checks."""

    def take(**_: Any) -> None: ...

    names = ["config", *FLAGS, *(key for key in Config.model_fields if key not in ("user_paths", *FILE_ONLY))]
    parameters = []
    for key in (*names, *OF_TORCHRUN.split()):
        field = Config.model_fields.get(key)
        text = FLAGS.get(key) or (field.description if field else None) or "see 'ttprun run --help'"
        default = typer.Option(None, option_name(key), help=text)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(key, kind, default=default, annotation=str))
    take.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    take.__annotations__ = {parameter.name: str for parameter in parameters}
    return take
