"""State that no attribute shows is restored, or named before and after a fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import Run, assert_only_replaced, assert_same_outcome
from ttprun.capture.effects.file_answers import WRITTEN_AGAIN


def test_what_only_an_evaluation_has_made_is_made_again_or_named_and_costs_no_restart(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    """Lost between two steps: no loss would show what the objects do; the replay has passed over all evaluations."""
    result = run_ttprun("evaluates_with_locks.py", 2, faults=["kill:rank=1,step=19,phase=after_step"])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed("evaluates_with_locks.py", 2))
    (named,) = [name for name in result.incidents[0]["not_proved"] if "evaluation" in name]
    assert "FileLock, is not in the replacement" in named, result.story()


EFFECTS = """
import signal, sqlite3, torch, torch.distributed as dist

signal.signal(signal.SIGALRM, lambda *_: print("a handler prints", "and again", sep="\\n", flush=True))
dist.init_process_group("gloo")
rank = dist.get_rank()
rows = sqlite3.connect(f"rows-{rank}.db", isolation_level=None)
rows.execute("create table if not exists steps (number integer)")
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 16):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 16)).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(f"rank {rank} step {step};", flush=True)
    rows.execute("insert into steps values (?)", (step,))
    if step == 10 and rows.execute("select count(*) from steps where number = 10").fetchone() == (1,):
        signal.raise_signal(signal.SIGALRM)
dist.destroy_process_group()
"""


def test_what_is_written_twice_is_named_before_and_what_a_handler_has_printed_costs_no_line(
    run_ttprun: Callable[..., Run], tmp_path: Path
) -> None:
    """The lost rank's handler has printed two lines more in the step that the replacement runs again."""
    (tmp_path / "effects.py").write_text(EFFECTS)

    result = run_ttprun(str(tmp_path / "effects.py"), 2, faults=["kill:rank=1,step=10,phase=backward"])

    (incident,) = result.incidents
    named = f"rows-1.db (sqlite3): {WRITTEN_AGAIN}"
    assert incident["outcome"] == "recovered", result.story()
    assert named in result.status["not_proved"]
    assert named in incident["not_proved"]
    assert f"if a rank is replaced: {named} (ttprun explain written-again)" in result.output, result.story()
    said = [f"rank 1 step {step};" for step in range(1, 16)]
    assert result.stdout[1] == [*said[:10], "a handler prints", "and again", *said[10:]], result.story()


def test_what_is_too_dear_to_record_is_left_alone_and_named_once(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    result = run_ttprun("dear_study.py", 2, faults=["kill:rank=1,step=60,phase=backward"])

    (named,) = {re.sub(r"\d+", "N", name) for name in result.status["not_proved"]}
    lines = [line for line in result.output.splitlines() if "study" in line]
    assert named == "study (__main__.Study): about N ms a step to record; not recorded"
    assert_only_replaced(result)
    assert result.incidents[0]["not_proved"][0].startswith("study (__main__.Study): about ")
    assert lines
    assert max(map(len, lines)) <= 400
    assert result.status["cost"]["parts"]["record"] > 0
    assert_same_outcome(result, undisturbed("dear_study.py", 2))
