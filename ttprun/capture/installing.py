"""What capturing installs in a process, beside its rows of the table of patches, and what it forgets after a run.

torch.compile must not trace our functions: a compiled function calls our process groups, hooks and wrappers, and Dynamo
cannot trace a process group. Functions that are called inside the user's own code, in `loops` and here, must be traced,
or the graph would break; they do nothing then.

What is changed in frameworks is one table, applied when the script has imported them. Lightning's modules are there
under two names, each with classes of its own.

* Its CSVLogger writes its file anew when a metric with a new name comes. A row that the lost rank wrote after the
  boundary may have columns that the replacement has not met yet. So the writer counts its rows, in an attribute that is
  recorded like its others, and a replacement first takes later rows away.
* Its evaluation loop keeps the iterator over its loader until the next evaluation. A replay passes over earlier
  evaluations, or has run the sanity check alone, which is shorter. So what an evaluation has used is dropped when it is
  over, as it would be by the next one: between evaluations there is nothing to restore.
* TensorBoard's event files: each event is written once, to the lost rank's file. A replay makes a writer of the same
  name (origins.py), which would truncate the file. So in a replay no event is added, and the file is appended to
  afterwards. Events are counted like appended bytes (script_files.py): those that the lost rank has added since the
  boundary are skipped.
"""

from __future__ import annotations

import csv
import functools
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ttprun.capture import recording, values
from ttprun.capture.data import loaders
from ttprun.capture.effects import origins, output, script_files
from ttprun.capture.position import loops, made_inside
from ttprun.introspect import fail_open
from ttprun.introspect.current_rank import Rank, current
from ttprun.introspect.patching import after_import


def wrap_run(original: Any) -> Any:
    """_EvaluationLoop.run."""

    def run(self: Any) -> Any:
        outputs = original(self)
        self._data_fetcher = None
        if self._combined_loader is not None:
            self._combined_loader._iterator = None
        return outputs

    return run


def wrap_teardown(original: Any) -> Any:
    """_EvaluationLoop.teardown, which ends the loaders' workers by way of what was dropped."""

    def teardown(self: Any) -> None:
        original(self)
        if self._combined_loader is not None:
            self._combined_loader.reset()

    return teardown


_ROWS = "_ttprun_rows"


def wrap_save(original: Any) -> Any:
    """_ExperimentWriter.save."""

    def save(self: Any) -> None:
        session, new = current(), len(self.metrics)
        if session is not None and not session.mode.is_live:
            self.metrics = []  # the boundary's record says what stands in it, and what it has written
            return
        if session is not None and new and script_files.is_to_be_written_again(session, self.metrics_file_path):
            _take_away_later_rows(session, self)
        original(self)
        setattr(self, _ROWS, getattr(self, _ROWS, 0) + new)

    return save


def _take_away_later_rows(session: Rank, writer: Any) -> None:
    path, count = writer.metrics_file_path, getattr(writer, _ROWS, 0)
    script_files.forget_appends(session, path)
    if not count:
        os.remove(path)
        return
    with script_files.open_unfollowed(path, newline="") as file:
        rows = list(csv.DictReader(file))[:count]
    with script_files.open_unfollowed(path, "w", newline="") as file:
        table = csv.DictWriter(file, writer.metrics_keys, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    if len(rows) < count:  # the lost rank was about to write it anew
        session.observers.report([], [f"of {count} rows of {path} the lost rank has left {len(rows)}"])


def wrap_add_event(original: Any) -> Any:
    """EventFileWriter.add_event."""

    def add_event(self: Any, event: Any) -> None:
        session = current()
        if session is None:
            original(self, event)
        elif session.mode.is_alone:
            if not _appends(self) and event.HasField("file_version"):
                name = getattr(self, "_file_name", "a file")
                session.observers.report([], [f"TensorBoard continues in another file than the lost rank's: {name}"])
                original(self, event)  # each new file must begin with its version
        else:
            key = script_files.key_of(f"{getattr(self, '_file_name', '')}#events")
            script_files.append(session, key, b"+", lambda data: original(self, event) or len(data))

    return add_event


def _appends(writer: Any) -> bool:
    """Whether the lost rank had a file of this name; if so, the writer appends to it from now on."""
    file = getattr(writer, "_general_file_writer", None)
    if file is None or not os.path.exists(str(getattr(writer, "_file_name", ""))):
        return False
    if hasattr(file, "write_started"):
        file.write_started = True
        return True
    return False


class _Row(NamedTuple):
    """One change.

    packages  of which one has the module
    module    in the package
    function  "Class.function" in it, or "function"
    wrap      given the original, returns ours
    """

    packages: str
    module: str
    function: str
    wrap: Callable[[Any], Any]


_FABRIC = "lightning.fabric lightning_fabric"
_TRAINER = "lightning.pytorch pytorch_lightning"
_TABLE = (
    _Row(_FABRIC, "loggers.csv_logs", "_ExperimentWriter.save", wrap_save),
    _Row(_FABRIC, "plugins.io.torch_io", "TorchCheckpointIO.save_checkpoint", script_files.leave_out_in_replay),
    _Row(_FABRIC, "plugins.io.torch_io", "TorchCheckpointIO.remove_checkpoint", script_files.leave_out_in_replay),
    _Row(_TRAINER, "loops.evaluation_loop", "_EvaluationLoop.run", wrap_run),
    _Row(_TRAINER, "loops.evaluation_loop", "_EvaluationLoop.teardown", wrap_teardown),
    _Row("tensorboard", "summary.writer.event_file_writer", "EventFileWriter.add_event", wrap_add_event),
)
_ours: list[Any] = []


def follow() -> None:
    """Change them once the script has imported them."""
    for module in {f"{package}.{row.module}" for row in _TABLE for package in row.packages.split()}:
        after_import(module, functools.partial(_change, module))


def _change(module: str) -> None:
    for row in _TABLE:
        kind, _, name = row.function.rpartition(".")
        owner: Any = sys.modules.get(module)
        owner = getattr(owner, kind, None) if kind else owner
        if module not in (f"{package}.{row.module}" for package in row.packages.split()) or owner is None:
            continue
        original = vars(owner).get(name)
        if original is not None and original not in _ours:
            ours = functools.wraps(original)(fail_open.guard(f"{module}.{row.function}", original, row.wrap))
            _ours.append(ours)
            setattr(owner, name, ours)


_RULES = "torch._dynamo.trace_rules"


def leave_us_alone() -> None:
    """Exclude our modules from Dynamo's tracing, now or when it is imported."""
    if _RULES in sys.modules:
        _add_rules()
    else:
        after_import(_RULES, _add_rules)


def _add_rules() -> None:
    # By files: `rules.add` compiles one pattern of all untraced modules each time, which takes a second in all.
    skipped: Any = getattr(sys.modules[_RULES], "FORCE_SKIP_FILES", set())  # other versions may have none
    traced = (loops.__name__, __name__)
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("ttprun.") and name not in traced]
    skipped.update(module.__file__ for module in ours if module.__file__ is not None)


def unless_traced(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, not called while torch.compile traces."""

    def call(*args: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            hook(*args)

    return call


def install(steps_now: Callable[[], recording.Steps] = lambda: recording.Steps((), {}, [], None)) -> str:
    """Install what needs torch; returns which times are not repeated for a replacement, "" if all are.

    steps_now   the script's optimizers, asked where a trial of a sweep begins
    """
    note_pass = partial(recording.note_pass, steps_now)
    loops.Hooks.note_pass = fail_open.hook("the start of a loop's pass", note_pass)
    loops.Hooks.is_compiling = torch.compiler.is_dynamo_compiling
    leave_us_alone()
    output.note_lines()
    follow()
    return origins.why_not()


def forget() -> None:
    """The run of the script is over."""
    loaders.forget()
    values.forget()
    made_inside.forget()
    loops.give_back()
