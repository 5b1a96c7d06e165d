"""Records the live state of a Python training loop, and restores it in another process.

    recording.py   gathers a boundary's record: position (loops, call sites), values (variables), data (DataLoaders)
    replay         how a script, run from its top, becomes what a record says; what another run takes of a record
    effects        what the script has written and was answered: files, output, time, entropy

May import: introspect, device, protocol. Begin with recording.py. Without a rank: tests/alone/capture.py.

PATCHES is what it changes in a script's process: rows of the table that `ttprun explain` prints. Beside these are the
loops of the script (position/user_code.py), and the functions of effects/file_system.py.
"""

from __future__ import annotations

from ttprun.introspect.patching import Patch

_LOADER = "torch.utils.data.dataloader"
_CLOCKS = {
    "time": "wrap_time",
    "time_ns": "wrap_time_ns",
    "localtime": "wrap_of_seconds",
    "gmtime": "wrap_of_seconds",
    "ctime": "wrap_of_seconds",
    "strftime": "wrap_text",
    "asctime": "wrap_text",
}
PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.autograd.graph",
        "saved_tensors_hooks.__enter__",
        "capture.values.autograd_graphs:wrap_saved_tensors_hooks",
        "before torch 2.13, to leave alone what the script packs itself when a tensor's history is looked at",
    ),
    Patch(
        _LOADER, "DataLoader.__init__", "capture.data.loaders:wrap_init", "to name a loader by its place in the script"
    ),
    Patch(_LOADER, "DataLoader.__iter__", "capture.data.loaders:wrap_iter", "to record the positions of its iterators"),
    Patch(
        _LOADER,
        "_BaseDataLoaderIter.__next__",
        "capture.data.loaders:wrap_next",
        "to know the newest batch, and when an iterator has ended",
    ),
    Patch(
        _LOADER,
        "_BaseDataLoaderIter.__next__",
        "capture.data.loaders:wrap_next_in_replay",
        "in a replay, to return placeholders for batches that were used",
        "replay",
    ),
    Patch(
        _LOADER,
        "_BaseDataLoaderIter._reset",
        "capture.data.loaders:wrap_reset",
        "to know when a persistent iterator restarts",
    ),
    Patch(
        _LOADER,
        "_BaseDataLoaderIter._next_index",
        "capture.data.loaders:wrap_next_index",
        "in a replay, to skip batches that were used",
        "replay",
    ),
    Patch(
        _LOADER,
        "_BaseDataLoaderIter.__init__",
        "capture.data.loaders:wrap_iterator_init",
        "in a replay, to give its workers the seed of the lost rank's",
        "replay",
    ),
    *(
        Patch(
            "torchdata.stateful_dataloader.stateful_dataloader",
            f"StatefulDataLoader.{method}",
            f"capture.data.loaders:{ours}",
            "as torch's DataLoader",
            "imported",
        )
        for method, ours in (("__init__", "wrap_init"), ("__iter__", "wrap_iter"))
    ),
    Patch("torch.serialization", "save", "capture.effects.script_files:wrap_save", "in a replay, to save nothing"),
    Patch("safetensors", "serialize_file", "capture.effects.script_files:wrap_save", "in a replay, to save nothing"),
    *(
        Patch(
            "time",
            name,
            f"capture.effects.origins:{ours}",
            "up to the first step, to give a replacement's setup the same time, so that it names the same folders",
            "early",
        )
        for name, ours in _CLOCKS.items()
    ),
    Patch(
        "os",
        "getpid",
        "capture.effects.origins:wrap_getpid",
        "up to the first step, so that TensorBoard names the same files; other callers get the real pid",
        "early",
    ),
    Patch(
        "os",
        "urandom",
        "capture.effects.origins:wrap_urandom",
        "up to the first step, to give a replacement the same uuids; then to notice what cannot be replayed",
        "early",
    ),
    Patch(
        "random",
        "_urandom",
        "capture.effects.origins:wrap_urandom",
        "as os.urandom, for random.SystemRandom",
        "early",
    ),
    Patch(
        "queue",
        "Queue.get",
        "capture.values.process_objects:wrap_get",
        "to distinguish a log's queue from a queue of data",
    ),
    Patch(
        "queue",
        "Queue.put",
        "capture.values.process_objects:wrap_put",
        "to distinguish a log's queue from a queue of data",
    ),
    Patch(
        "builtins",
        "open",
        "capture.effects.script_files:wrap_open",
        "to know the positions in the files that the script writes",
    ),
    Patch(
        "io", "open", "capture.effects.script_files:wrap_open", "to know the positions in the files that pathlib opens"
    ),
)
