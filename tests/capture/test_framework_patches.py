"""What is changed in frameworks when the script has imported them; the frameworks here are fakes of the same names."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ttprun.capture import installing
from ttprun.capture.effects import script_files


def imported(monkeypatch: pytest.MonkeyPatch, name: str, kind: type) -> Any:
    """A framework's module of this name, with a class in it, as it is once the script has imported it."""
    module = ModuleType(name)
    setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, name, module)
    installing._change(name)
    installing._change(name)  # somebody has reloaded it
    return module


class Loader:
    """As CombinedLoader: what its reset() does, it does without an iterator, too."""

    _iterator: Any = "an iterator"
    has_ended_workers = False

    def reset(self) -> None:
        self.has_ended_workers = True


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_an_evaluation_that_is_over_holds_no_iterator_and_its_loaders_still_end_their_workers(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    class _EvaluationLoop:  # Lightning's name
        _data_fetcher: Any = "a fetcher"

        def __init__(self) -> None:
            self._combined_loader = Loader()

        def run(self) -> list[str]:
            assert self._data_fetcher
            assert self._combined_loader._iterator
            return ["found"]

        def teardown(self) -> None:
            assert self._data_fetcher is None

    loop = imported(monkeypatch, f"{package}.loops.evaluation_loop", _EvaluationLoop)._EvaluationLoop()

    assert loop.run() == ["found"]
    assert loop._combined_loader._iterator is None
    assert not loop._combined_loader.has_ended_workers
    loop.teardown()
    assert loop._combined_loader.has_ended_workers


def test_a_checkpoint_is_written_and_removed_in_a_run_and_neither_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    class TorchCheckpointIO:
        def save_checkpoint(self, checkpoint: Any, path: str, storage_options: Any = None) -> None:
            done.append(f"saved {path}")

        def remove_checkpoint(self, path: str) -> None:
            done.append(f"removed {path}")

    module = imported(monkeypatch, "lightning.fabric.plugins.io.torch_io", TorchCheckpointIO)
    writer, session = module.TorchCheckpointIO(), SimpleNamespace()
    monkeypatch.setattr(script_files, "current", lambda: session)
    for is_live in (False, True):
        session.mode = SimpleNamespace(is_live=is_live)
        writer.save_checkpoint({}, "last.ckpt", storage_options=None)
        writer.remove_checkpoint("first.ckpt")

    assert done == ["saved last.ckpt", "removed first.ckpt"]
