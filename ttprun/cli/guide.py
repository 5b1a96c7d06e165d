"""`ttprun guide`: the handbook, from the Markdown files that are shipped in the package; without torch."""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Annotated, get_args

import typer
from msgspec.structs import fields as fields_of
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markdown import Markdown

from ttprun.cli.options import metavar
from ttprun.cli.support import support_matrix
from ttprun.cli.terminal import new_table, open_console
from ttprun.config import Config
from ttprun.config_sources import FILE_ONLY, VARIABLE_PREFIX, option_name, preset
from ttprun.errors import ConfigError, suggestion
from ttprun.protocol.channel import Report
from ttprun.protocol.reasons import REASONS

# The reference of the configuration as Markdown, generated from the model and from the commented preset `default`.


def config_reference() -> str:
    """A list of every key, then the preset `default` with its explanations."""
    keys = [_item(key, field) for key, field in Config.model_fields.items()]
    explained = preset("default").read_text(encoding="utf-8").rstrip("\n")
    return "\n".join([*keys, "", "## The same as a commented file", "", "```yaml", explained, "```"])


def _item(key: str, field: FieldInfo) -> str:
    """One key with its default, its option and its variable, and what it means."""
    spellings = [f"`{key}: {_as_yaml(field.get_default(call_default_factory=True))}`"]
    if key not in ("user_paths", *FILE_ONLY):
        name = option_name(key)
        option = f"[no-]{name[2:]}" if field.annotation is bool else f"{name[2:]} {metavar(key)}"
        spellings.append(f"`--{option}`")
    if key not in FILE_ONLY:
        spellings.append(f"`{VARIABLE_PREFIX}{key.upper()}`")
    return f"* {', '.join(spellings)}: {field.description}"


def _as_yaml(value: object) -> str:
    """A default as a YAML file has it."""
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


# The messages of the protocol as Markdown, generated from their classes.


def message_reference() -> str:
    """A list of what a rank reports to the agent: each message with its fields and the first line of its docstring."""
    return "\n".join(map(_message_item, get_args(Report)))


def _message_item(kind: type) -> str:
    names = [field.name for field in fields_of(kind) if field.name not in ("at_s", "rank")]  # which its agent fills in
    fields = f" ({', '.join(names)})" if names else ""
    return f"* `{kind.__name__}`{fields}: {(inspect.getdoc(kind) or '').partition(chr(10))[0]}"


# The reasons as Markdown, generated from their table.


def reason_reference() -> str:
    """A list of all reasons, word by word: each kind with what it means and what helps."""
    return "\n".join(f"* `{row.kind}` ({row.word}): {row.means} What helps: {row.cure}." for row in REASONS)


FOLDER = Path(__file__).resolve().parent.parent / "guide"
# In the order in which a reader may want them; each is a file of `ttprun/guide`.
TOPICS = {
    "check": "try your own script first: is a rank of it recovered?",
    "frameworks": "transformers, accelerate and others: how they are started, what of them is followed",
    "how-it-works": "what happens when a rank dies, and what is proved before training goes on",
    "support": "what a lost rank costs, row by row, with the tests that prove it and when they were green",
    "limits": "what is covered, what is not, and what a fault costs then",
    "operating": "runs, signals, exit codes, Slurm, Kubernetes, Ray, what the status says",
    "monitoring": "the page of a run, metrics, reports",
    "checkpoints": "saved state, snapshots, resuming, another number of ranks",
    "fault-drills": "break a job on purpose and compare it with an undisturbed one",
    "devices": "device errors, GPUs, NPUs and the simulated NPU",
    "mindio": "frameworks that recover by callbacks of their own",
    "troubleshoot": "by symptom and by message: what it means, and what to do",
    "migrate": "from torchrun, accelerate, deepspeed, mp.spawn, Slurm, Kubernetes, ...: before and after",
    "glossary": "the words that ttprun uses: boundary, rung, standby, replay, ...",
    "configuration": "every key, variable and option, generated from the configuration model",
    "architecture": "how the source tree is cut, and where to begin reading",
    "protocol": "messages between agent and ranks, the record, a checkpoint's files",
    "contributing": "how to run the tests, add an adapter, an error text, a patch",
}
# Words of ours that a reader of one page may not know.
DEFINED = ("boundary", "rung", "generation", "standby", "replay", "rewind", "mirror", "journal", "mindio", "incident")
# What stands for text that is generated when the page is shown, so that it cannot differ from the code.
_GENERATED = {
    "<!-- generated: every key -->": config_reference,
    "<!-- generated: every report -->": message_reference,
    "<!-- generated: every reason -->": reason_reference,
    "<!-- generated: the support matrix -->": support_matrix,
}


def guide(
    topic: Annotated[str | None, typer.Argument(help="A topic; without one, the topics are listed.")] = None,
) -> int:
    """Show the handbook, topic by topic.

    On a terminal a topic is shown in your pager ($PAGER); in a pipe it is plain Markdown.
    """
    if topic is None:
        list_topics()
        return 0
    if topic not in TOPICS:
        raise ConfigError(f"the guide has no topic '{topic}'", suggestion(topic, TOPICS, "'ttprun guide' lists them"))
    page = read_page(topic)
    if sys.stdout.isatty():
        show_in_pager(page)
    else:
        sys.stdout.write(page)
        sys.stdout.flush()
    return 0


def list_topics() -> None:
    """Print the topics, and what each is about."""
    console = open_console()
    table = new_table(console, "topic", "what it is about")
    for name, about in TOPICS.items():
        table.add_row(name, about)
    console.print(table)
    if console.is_terminal:
        console.print("Show one: ttprun guide TOPIC")


def read_page(topic: str) -> str:
    """The Markdown text of a topic, with what is generated in its place."""
    text = (FOLDER / f"{topic}.md").read_text(encoding="utf-8")
    for placeholder, generate in _GENERATED.items():
        if placeholder in text:
            text = text.replace(placeholder, generate())
    return text if topic == "glossary" else _with_glossary(text)


def _with_glossary(text: str) -> str:
    """A page with a line below its title that says where the words of ours that it uses are explained."""
    used = [word for word in DEFINED if re.search(rf"\b{word}", text)]
    title, _, rest = text.partition("\n\n")
    named = f"*Words explained in `ttprun guide glossary`: {', '.join(used)}.*"
    return f"{title}\n\n{named}\n\n{rest}" if used else text


def show_in_pager(page: str) -> None:
    """Show Markdown in the user's pager, formatted."""
    # As git does: `less` shows colours, and ends by itself if all fits on the screen.
    os.environ.setdefault("LESS", "FRX")
    console = Console(emoji=False, width=min(Console().width, 120))
    with console.pager(styles=True):
        console.print(Markdown(page))
