"""The commands of ttprun besides running a script, and what a shell completes of them.

A shell asks on each press of the tab key, so torch is not imported then.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

# Command -> module, function. The function's docstring and signature are the command's help and options. A command with
# commands of its own has a typer app instead.
COMMANDS = {
    "status": ("ttprun.cli.run_reports", "status"),
    "report": ("ttprun.cli.run_reports", "report"),
    "stacks": ("ttprun.cli.control", "stacks"),
    "topology": ("ttprun.cli.run_reports", "topology"),
    "inject-fault": ("ttprun.cli.control", "inject_fault"),
    "recall": ("ttprun.cli.control", "recall"),
    "check": ("ttprun.cli.rehearsals", "check"),
    "drill": ("ttprun.cli.rehearsals", "drill"),
    "checkpoints": ("ttprun.cli.checkpoints_command", "app"),
    "checkpoint": ("ttprun.cli.checkpoints_command", "app"),  # as in `ttprun checkpoint now`
    "demo": ("ttprun.cli.rehearsals", "demo"),
    "doctor": ("ttprun.cli.doctor", "doctor"),
    "explain": ("ttprun.cli.guide", "explain"),
    "guide": ("ttprun.cli.guide", "guide"),
}
# Commands that take a launch's command line, which typer cannot: they parse their words themselves.
LAUNCHING = ("check",)


def build_app() -> typer.Typer:
    """One typer app with every command, which `ttprun` itself never runs: it imports one command alone."""
    import typer

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
    import typer

    from ttprun.cli.command_line import FLAGS
    from ttprun.config import Config
    from ttprun.config_sources import FILE_ONLY, OF_TORCHRUN, option_name

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
