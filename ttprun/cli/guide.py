"""`ttprun guide` and `ttprun explain`: the handbook, and what of it is generated from tables of the code.

Without torch. Begin with `guide` and `explain`.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml
from msgspec.structs import fields as fields_of
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markdown import Markdown

from ttprun.cli.command_line import metavar
from ttprun.cli.terminal import new_table, open_console
from ttprun.config import Config
from ttprun.config_sources import FILE_ONLY, VARIABLE_PREFIX, option_name, preset
from ttprun.errors import ConfigError, suggestion
from ttprun.protocol.channel import Report
from ttprun.protocol.reason import kind_in
from ttprun.protocol.reasons import KINDS, REASONS, WORDS, ReasonKind

TABLE = Path(__file__).resolve().parent.parent / "guide" / "support.yaml"
COSTS = {
    "replace": "that rank alone gets a new process; no step is lost",
    "rerun": "the same, in its own process",
    "rewind": "all ranks go back to the newest snapshot",
    "resize": "the others train on without it",
    "restart": "all ranks start again, from the state that is saved when the rank is lost if that can be used",
    "not protected": "as under torchrun",
}


def support_matrix() -> str:
    """Markdown: each row with its tests, and the releases that were tried."""
    table, slow = read_table(), read_results("slow.json")
    lines: list[str] = []
    for lost, cost in COSTS.items():
        lines += [f"## {lost}: {cost}", ""]
        for row in table["rows"]:
            if row["lost"] == lost:
                lines += [*_row(row, slow), ""]
    lines += ["## Releases", "", "A dozen whole jobs, one of each kind of recovery, were run on these:", ""]
    for pair, seen in read_results("versions.json").items():
        lines.append(f"* {pair}: {seen['passed']} passed, {seen['failed']} failed, {seen['date']}, {seen['commit']}")
    return "\n".join(lines)


def _row(row: dict[str, Any], slow: dict[str, dict[str, Any]]) -> Iterator[str]:
    device = ", on a simulated device only" if row["device"] == "simulated" else ""
    yield f"* **{row['backend']} · {row['parallelism']}**{device}: {row['program']}"
    for often, tests in row["proof"].items():
        for test in tests:
            seen = "" if often == "every check" else f" ({last_green(test, slow)})"
            yield f"  * {often}{seen}: `tests/{test}`"


def last_green(test: str, slow: dict[str, dict[str, Any]]) -> str:
    """When the cases of a test were last seen green, and with what; of several cases, the one longest ago."""
    name = test.rpartition("/")[2]
    cases = [seen for case, seen in slow.items() if case.partition("[")[0] == name]
    greens = sorted((case["green"] for case in cases if "green" in case), key=lambda green: str(green["date"]))
    failed = sum("failed" in case for case in cases)
    words = [f"{failed} cases failed in their last run"] if failed else []
    if not greens:
        return ", ".join(["not seen green on this code yet", *words])
    first = greens[0]
    versions = f"torch {first['torch']}, Python {first['python']}"
    return ", ".join([f"{len(greens)} cases green, {first['date']}, {first['commit']}, {versions}", *words])


def read_table() -> dict[str, Any]:
    """The parts (the README's rows) and the rows of the matrix."""
    return dict(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


def read_results(name: str) -> dict[str, dict[str, Any]]:
    """A file of results: in an installed package beside this one, in a checkout among the tests; {} where it is not."""
    package = TABLE.parent.parent
    for folder in (package / "results", package.parent / "tests" / "results"):
        if (folder / name).is_file():
            return dict(json.loads((folder / name).read_text(encoding="utf-8")))
    return {}


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
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


# The messages of the protocol as Markdown, generated from their classes.


def _message_item(kind: type) -> str:
    names = [field.name for field in fields_of(kind) if field.name not in ("at_s", "rank")]  # which its agent fills in
    fields = f" ({', '.join(names)})" if names else ""
    return f"* `{kind.__name__}`{fields}: {(inspect.getdoc(kind) or '').partition(chr(10))[0]}"


FOLDER = Path(__file__).resolve().parent.parent / "guide"
# In the order in which a reader may want them; each is a file of `ttprun/guide`.
TOPICS = {
    "check": "try your own script first: is a rank of it recovered?",
    "compare": "two runs that should be the same are not: the first step in which they differ, and in what",
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
    "extending": "commands and listeners of your own package, by entry points",
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
    "<!-- generated: every report -->": lambda: "\n".join(map(_message_item, get_args(Report))),
    "<!-- generated: every reason -->": lambda: "\n".join(
        f"* `{row.kind}` ({row.word}): {row.means} What helps: {row.cure}." for row in REASONS
    ),
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


# `ttprun explain`: what ttprun changes inside the user's process, how it judges variables, and what a reason means.


MEANING = (
    "ttprun does not change your files: it wraps the functions below inside each rank's process, to record what a "
    "replacement of that rank needs and to rebuild its connections."
)
JUDGEMENT = (
    "When a rank is replaced, each variable of the script is judged by the first line that fits; behind the arrow, "
    "what follows from it."
)
KINDS_OF_REASONS = (
    "Why a rank is not replaced, or not proved, has one of these kinds; 'ttprun explain KIND' explains one."
)
_MOST_COLUMNS = 100


def explain(
    reason: Annotated[
        list[str] | None, typer.Argument(help="A kind of reason, as journal-full, or a message, in quotes.")
    ] = None,
) -> int:
    """Show what ttprun changes inside your process, and why; and how it judges your variables.

    Your files are never changed. With a reason that ttprun has given: what it means, what ttprun does then, and what
    helps. Exit code: 0, or 2 if the reason is not known.
    """
    if reason:
        explain_reason(find_reason(" ".join(reason)))
    else:
        explain_changes()
    return 0


def find_reason(text: str) -> ReasonKind:
    """The reason of this kind, or of the kind that a message names. Raises ConfigError if there is none."""
    row = KINDS.get(text) or KINDS.get(kind_in(" ".join(text.split())))
    if row is None:
        cure = suggestion(text, KINDS, "'ttprun explain' lists the kinds; a message ends with its own in brackets")
        raise ConfigError(f"no reason is known as '{text[:80]}'", cure)
    return row


def explain_reason(row: ReasonKind) -> None:
    """Print a row of the table of reasons."""
    topic, _, heading = row.where.partition("#")
    width = width_of_lines()
    print(f"{row.kind}: {row.word}\n")
    print("\n".join(_indented([row.means], width)))
    for title, text in (
        ("what ttprun does then", row.then or WORDS[row.word]),
        ("what helps", row.cure),
        ("more", f"ttprun guide {topic}, under '{heading}'"),
    ):
        print("\n".join(["", title, *_indented([text], width)]))


def explain_changes() -> None:
    """Print the tables of what is changed, of how variables are judged, and the kinds of reasons."""
    from ttprun.capture.position.judgement import ORDER
    from ttprun.rank.bootstrap.patch_table import ALSO, PATCHES, Change, Patch

    rows: tuple[Patch | Change, ...] = (*PATCHES, *ALSO)
    width = width_of_lines()
    print(textwrap.fill(MEANING, width))
    for patch in rows:
        name = f"{patch.module}: {patch.attribute}"
        name = textwrap.fill(name, width, break_long_words=False, break_on_hyphens=False)
        print("\n".join(["", name, *_indented([patch.why], width)]))
    print("\n" + textwrap.fill(JUDGEMENT, width))
    for rule in ORDER:
        print("\n".join(["", rule.name, *_indented([rule.when, f"→ {rule.follows}"], width)]))
    print("\n" + textwrap.fill(KINDS_OF_REASONS, width))
    for word in WORDS:
        kinds = ", ".join(row.kind for row in REASONS if row.word == word)
        print("\n".join(["", word, *_indented([kinds], width)]))


def width_of_lines() -> int:
    """Characters of a line: those of the terminal, or COLUMNS, and no more than are read with ease."""
    return max(20, min(shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns, _MOST_COLUMNS))


def _indented(paragraphs: Iterable[str], width: int) -> Iterable[str]:
    for text in paragraphs:
        yield textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
