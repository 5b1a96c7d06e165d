"""The commands of ttprun, besides running a script."""

from __future__ import annotations

# Command -> module, function. The function's docstring and signature are the command's help and options. A command with
# commands of its own has a typer app instead.
COMMANDS = {
    "status": ("ttprun.cli.status_command", "status"),
    "report": ("ttprun.cli.support", "report"),
    "stacks": ("ttprun.cli.stacks_command", "stacks"),
    "topology": ("ttprun.cli.stacks_command", "topology"),
    "inject-fault": ("ttprun.cli.inject_fault", "inject_fault"),
    "recall": ("ttprun.cli.options", "recall"),
    "check": ("ttprun.cli.check", "check"),
    "drill": ("ttprun.cli.drill", "drill"),
    "checkpoints": ("ttprun.cli.checkpoints_command", "app"),
    "checkpoint": ("ttprun.cli.checkpoints_command", "app"),  # as in `ttprun checkpoint now`
    "demo": ("ttprun.cli.drill", "demo"),
    "doctor": ("ttprun.cli.doctor", "doctor"),
    "explain": ("ttprun.cli.explain", "explain"),
    "guide": ("ttprun.cli.guide", "guide"),
}
# Commands that take a launch's command line, which typer cannot: they parse their words themselves.
LAUNCHING = ("check",)
