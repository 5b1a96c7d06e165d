"""The `ttprun` command: finds out which command is meant and imports that one alone.

Whatever does not begin with a command's name is `ttprun [options] script.py [script args]`, torchrun's command line;
`run` is its long spelling, for a script that has the name of a command. A shell asks on each press of the tab key what
it can complete: only the command that is meant is imported, so torch is not imported then.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import io
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from ttprun import __version__, early_signals
from ttprun.cli.terminal import ALIKE, through
from ttprun.errors import ConfigError

if TYPE_CHECKING:
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
    "move": ("ttprun.cli.control", "move"),
    "drain": ("ttprun.cli.control", "drain"),
    "check": ("ttprun.cli.rehearsals", "check"),
    "drill": ("ttprun.cli.rehearsals", "drill"),
    "diff": ("ttprun.cli.rehearsals", "diff"),
    "replay": ("ttprun.cli.rehearsals", "replay"),
    "checkpoints": ("ttprun.cli.checkpoints_command", "app"),
    "checkpoint": ("ttprun.cli.checkpoints_command", "app"),  # as in `ttprun checkpoint now`
    "demo": ("ttprun.cli.rehearsals", "demo"),
    "doctor": ("ttprun.cli.doctor", "doctor"),
    "explain": ("ttprun.cli.guide", "explain"),
    "guide": ("ttprun.cli.guide", "guide"),
}
# Commands that take a launch's command line, which typer cannot: they parse their words themselves.
LAUNCHING = ("check",)

USAGE_ERROR = 2
INTERRUPTED = 130
COMPLETION_OPTIONS = ("--install-completion", "--show-completion")
COMPLETION_VARIABLE = "_TTPRUN_COMPLETE"  # set where a shell asks, by what --install-completion has written

DESCRIPTION = """\
ttprun train.py runs like torchrun train.py. When a rank dies, ttprun replaces only that rank, in the middle of the
step; the script is not changed. 'ttprun check' finds out whether your script can be recovered in this way.
"""

EXAMPLES = """\
examples:
  ttprun demo                                                  see a killed rank come back, on this machine's processor
  ttprun --standalone --nproc-per-node 4 train.py --lr 0.1     four ranks on this machine
  ttprun --nproc-per-node 4 -m package.train                   a module instead of a file
  ttprun --config job.yaml --standbys 2 train.py               settings from a file, one of them overridden
  ttprun check --nproc-per-node 4 train.py --lr 0.1            would your script recover? runs some steps, kills ranks
  ttprun status --watch                                        in another terminal: the state of the newest run
  ttprun --allow-faults --nproc-per-node 3 train.py            try it by hand: allow faults, then, in another terminal:
  ttprun inject-fault kill --rank 1 --phase backward           kill rank 1 in the next backward pass
  ttprun drill configs/drills/one_kill.yaml                    rehearse faults, and compare with an undisturbed run

commands:
  run            the same as no command; needed for a script that has a command's name
  status         ranks and incidents of a run
  stacks         where each rank is now, in the Python code; ranks at the same place are shown together
  topology       which ranks hold the same shards, and what the loss of each rank would cost
  report         a run that is over or still running, as one HTML file or as Markdown
  inject-fault   cause a fault in a run that was started with --allow-faults
  recall         re-admit ranks that left the job (--mindio)
  move           give a healthy rank a new process, without losing a step
  drain          let a node that waits take the place of one that trains, for maintenance
  check          try your script before a long job: some steps with ranks killed, compared with an undisturbed run
  demo           a small training of our own, one rank killed, its weights compared with torchrun's
  drill          run a script under a schedule of faults, and compare it with an undisturbed run
  diff           the first step in which two runs with --trace differ, and in what: batch, loss, gradient, ...
  replay         a step of one rank that a run with --keep-steps has kept, taken again in one process
  checkpoint now save a running job, and wait until it is saved
  checkpoints    list, show and verify what a run has saved; export a model for load_state_dict
  doctor         what works on this machine, what does not, and how to fix it
  explain        what a reason means (ttprun explain KIND), or what ttprun changes inside your process, and why
  guide          the handbook, by topic; 'ttprun guide glossary' defines the words used here

Every option of torchrun works with the same meaning. Options before the script are ttprun's, options after it are the
script's. Every option below (torchrun's apart) is also a key of a YAML file and an environment variable: --standbys,
standbys:, TTPRUN_STANDBYS. 'ttprun COMMAND --help' explains a command; 'ttprun --version' prints the version;
'ttprun --install-completion' makes your shell complete commands and options.

exit codes: 0 done · 1 the script failed · 2 usage · 93 do not restart · 128+N ended by signal N · 130 Ctrl-C
"""

OF_TORCHRUN = """\
torchrun's options (the usual ones; 'ttprun run --help' lists all):
  --nproc-per-node N     ranks on this node, or cpu, gpu, auto (default: 1)
  --nnodes N|MIN:MAX     nodes (default: 1:1). Nodes beyond MIN wait as spares; with --elastic they train
  --rdzv-backend NAME    how several nodes find each other, e.g. c10d (default: static)
  --rdzv-endpoint H:P    address at which they do
  --standalone           one node, which picks a free port; not needed with ttprun
  --max-restarts N       restarts of all ranks from the top, when nothing else helps (default: 0)
  --log-dir, --redirects, --tee   where the ranks' output goes
  -m                     the script is a module
"""


def program() -> NoReturn:
    """The command `ttprun`: `main`, and the end of the process with the exit code that this returns.

    A daemon thread of torch's rendezvous that returns from C++ while the interpreter ends aborts the process (SIGABRT
    in place of that code). So it ends first, once the exit handlers of what was imported later have been called.
    """
    if not set(sys.argv[1:2]) & COMMANDS.keys():
        early_signals.listen()
    code: list[int] = []
    atexit.register(_leave, code)
    if sys.stdout is not None:
        sys.stdout = through(sys.stdout)
    try:
        exit_code = main()
    finally:
        print(end="", flush=True)  # what cannot be written is found here, not in the end of Python
    code.append(exit_code)
    sys.exit(exit_code)


def _leave(code: list[int]) -> None:
    if code and "torch" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
                stream.flush()
        os._exit(code[0])


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code. argv: without the program's name, default sys.argv[1:]."""
    arguments = sys.argv[1:] if argv is None else argv
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who has started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open to our end
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=ALIKE)
    try:
        if COMPLETION_VARIABLE in os.environ:
            return complete(arguments)
        if not arguments or arguments[0] in ("-h", "--help"):
            print_help()
            return 0 if arguments else USAGE_ERROR
        if arguments[0] == "--version":
            print(f"ttprun {__version__}")
            return 0
        if arguments[0] in COMPLETION_OPTIONS:
            return complete(arguments)
        if sys.platform != "linux":
            raise ConfigError("ttprun runs on Linux only", "use torchrun here")
        if (function := command_of(arguments[0])) is not None:
            is_launching = arguments[0] in LAUNCHING
            return int(function(arguments[1:])) if is_launching else run_command(arguments[0], function, arguments[1:])
        return run_script(arguments[1:] if arguments[0] == "run" else arguments)
    except ConfigError as error:
        for part in error.parts:
            print(f"ttprun: error: {part}", file=sys.stderr)
        return USAGE_ERROR
    except early_signals.StoppedEarly as stopped:
        print(f"ttprun: {stopped.reason}", file=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def command_of(word: str) -> Any:
    """The command of that name, ours or by another package's entry point `ttprun.commands`; None: it is a script."""
    if word in COMMANDS:
        module, name = COMMANDS[word]
        return getattr(import_module(module), name)
    from importlib.metadata import entry_points

    is_other = word.replace("-", "_").isidentifier() and not os.path.exists(word)
    others = entry_points(group="ttprun.commands", name=word) if is_other else ()
    return next((entry.load() for entry in others), None)


def run_script(words: list[str]) -> int:
    """Run a script on all ranks; if ttprun fails before they have begun, as torchrun does. Raises ConfigError.

    Not if the command line asks for no run (`--dry-run`): then the failure is reported, and nothing is started.
    """
    try:
        from ttprun.cli.run import run

        early_signals.look()
        return run(words)
    except ConfigError:
        raise
    except Exception as error:
        early_signals.look()

        from torch.distributed.elastic.rendezvous import RendezvousError

        elastic = sys.modules.get("ttprun.agent.launcher.elastic_agent")
        has_started = elastic is not None and elastic.ReplacingAgent.has_started_ranks
        if has_started or isinstance(error, RendezvousError):  # the latter is torch's own
            raise
        return run_as_torchrun(words, error)


def run_as_torchrun(words: list[str], error: Exception) -> int:
    """Say why protection is off, and run the command line by torch's own launcher. Returns the exit code.

    A bug of ours, or a release of torch that is not as we think, must not keep a job from running.

    words   of the command line, ours among them. If they ask for no run, none is started: the exit code is 1
    error   what has kept ttprun from running it
    """
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ttprun.cli.command_line import add_options, asked_instead
    from ttprun.observe import console

    parser = torchrun.get_args_parser()
    with contextlib.suppress(Exception):
        add_options(parser)
    arguments = parser.parse_args(words)
    is_run, why = not asked_instead(arguments), f"{type(error).__name__}: {' '.join(str(error).split())}"
    what = "protection is off, and the job runs as under torchrun" if is_run else "nothing was started"
    console.say(f"an error in ttprun itself ({why}); {what}; 'ttprun doctor' checks this machine")
    if not is_run:
        return 1
    try:
        torchrun.run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


def run_command(name: str, command: Callable[..., Any], arguments: list[str]) -> int:
    """Run a command that typer parses; returns its exit code.

    name        for help and messages
    command     a function with typer's annotations, or a typer app of several commands
    arguments   what follows the command's name

    Raises ConfigError, so that every usage error is one line of the same form.
    """
    import typer

    if isinstance(command, typer.Typer):
        app = command
    else:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(name, context_settings={"help_option_names": ["-h", "--help"]})(command)
    program = f"ttprun {name}"
    try:
        # Not "standalone": typer then returns what the function returns, and raises instead of printing.
        code: int | None = app(arguments, prog_name=program, standalone_mode=False)
    except typer.Abort:  # what it makes of Ctrl-C
        return INTERRUPTED
    except Exception as error:
        # typer contains click in some releases and depends on it in others, so its usage errors have no
        # importable name; they are the exceptions that can format their message.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        message = " ".join(str(describe()).split()).rstrip(".")
        raise ConfigError(message[:1].lower() + message[1:], f"see '{program} --help'") from None
    return code or 0


def complete(arguments: list[str]) -> int:
    """Answer a shell that completes a command line, or install what makes it ask. Ends the process when it answers."""
    return build_app()(arguments, prog_name="ttprun", standalone_mode=False) or 0


def build_app() -> typer.Typer:
    """One typer app with every command, which `ttprun` itself never runs: it imports one command alone."""
    import typer

    app = typer.Typer(add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(_options_of_a_run())
    app.command("run")(_options_of_a_run())
    for name in COMMANDS:
        command = _options_of_a_run() if name in LAUNCHING else command_of(name)
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


def print_help() -> None:
    """The short help: teaches by examples, lists commands and our own options; torch is not imported."""
    from argparse import ArgumentParser, RawDescriptionHelpFormatter

    from ttprun.cli.command_line import add_options

    parser = ArgumentParser(
        "ttprun",
        usage="ttprun [options] script.py [script args]\n       ttprun COMMAND [options]",
        description=DESCRIPTION + "\n" + EXAMPLES,
        epilog=OF_TORCHRUN,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.print_help()
