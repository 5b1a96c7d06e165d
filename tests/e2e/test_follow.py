"""The training loop of a framework that is named under `follow`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import PLAIN, SCRIPTS, Run, RunTtprun, assert_only_replaced, assert_same_outcome

FRAMEWORK = """
class Trainer:
    def __init__(self, log):
        self.log = log
        self.done = 0

    def fit(self, step, count):
        with open(self.log, "w") as log:
            for number in range(count):
                loss = step(number)
                self.done += 1
                log.write(f"{self.done} {loss!r}\\n")
"""


KILL = "kill:rank=1,step=20,phase=backward"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that trains by the framework, which is installed."""
    package = tmp_path / "site-packages" / "mytrainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from mytrainer.loop import Trainer\n")
    (package / "loop.py").write_text(FRAMEWORK)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before, loop, after = cut((SCRIPTS / PLAIN).read_text())
    script = tmp_path / "uses_a_framework.py"
    script.write_text(
        f"{before}import mytrainer\n\ndef train(step):\n    global loss\n{loop}    return loss.item()\n\n"
        f"mytrainer.Trainer(f'log{{rank}}.txt').fit(train, args.steps)\n{after}"
    )
    return script


def test_a_rank_that_trains_in_a_framework_that_an_earlier_run_has_met_is_replaced_without_configuration(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run], script: Path
) -> None:
    first = run_ttprun(str(script), 2, script_args=["--steps=2"])

    result = run_ttprun(str(script), 2, faults=[KILL])

    assert "its file is followed from the next run on" in " ".join(first.output.split())
    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(PLAIN, 2))
    assert "follow" not in result.output


STREAMS = """
def repeated(make):
    taken = 0
    while True:
        for batch in make():
            taken += 1
            yield {**batch, "weight": batch["weight"] + 0.001 * taken}
"""


def test_batches_from_a_library_s_generator_that_an_earlier_run_has_met_go_on_in_a_replacement(
    run_ttprun: RunTtprun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training loop is the script's own; that generator is a variable, and no loop runs over it."""
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "their_streams.py").write_text(STREAMS)
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own, call = "nested = repeated(first, 13)", "nested = their_streams.repeated(lambda: weighted(first, 13))"
    text = (SCRIPTS / "counting_iterators.py").read_text()
    shutil.copy(SCRIPTS / "around_the_loop.py", tmp_path)
    script = tmp_path / "takes_from_a_library.py"
    script.write_text(text.replace(own, call).replace("import torch\n", "import their_streams\nimport torch\n"))
    args, kill = ["--manner", "nested"], "kill:rank=1,step=15,phase=after_step"

    first = run_ttprun(str(script), 2, script_args=args)
    second = run_ttprun(str(script), 2, faults=[kill], script_args=args)

    said = "the generator repeated, whose loop is met for the first time: its file is followed from the next run on"
    assert said in " ".join(first.output.split()), first.story()
    assert_only_replaced(second)
    assert_same_outcome(second, first)


def cut(script: str) -> tuple[str, str, str]:
    """What stands before the training loop, in it, and after it."""
    head = "for step in range(args.steps):\n"
    before, _, rest = script.partition(head)
    loop, _, after = rest.partition("\nif rank == 0:\n")
    return before, loop, "if rank == 0:\n" + after
