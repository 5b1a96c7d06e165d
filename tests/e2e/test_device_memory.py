"""Errors of a device with memory of its own (the tests' simulated NPU), which raises them itself and late."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, RunTtprun, Undisturbed, assert_recovered_by, assert_same_outcome

SCRIPT = "on_device.py"
LAYOUTS = "device_layouts.py"
NPU = "npu"
ROOM_FOR_ONE = 50 << 20  # bytes; a rank of device_layouts.py, 256 wide, has 47 MiB of them


@pytest.mark.parametrize(
    ("fault", "rung", "kind", "processes"),
    [
        ("uce-high:rank=1,step=12,phase=forward", "rerun", "memory-persistent", [1, 1]),
        ("uce-low:rank=1,step=12,phase=backward", "rerun", "memory-temporary", [1, 1]),
        ("uce-fatal:rank=0,step=12,phase=before_step", "replace", "memory-outside-pool", [2, 1]),
        ("device-lost:rank=1,step=12,phase=after_step", "replace", "device-lost", [1, 2]),
        ("link:rank=1,step=12,phase=collective", "rerun", "link", [1, 1]),
    ],
)
def test_each_error_of_a_device_is_answered_in_its_way_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, fault: str, rung: str, kind: str, processes: list[int]
) -> None:
    reference = undisturbed(SCRIPT, 2, device=NPU)

    result = run_ttprun(SCRIPT, 2, faults=[fault], device=NPU)

    assert_recovered_by(result, [rung])
    assert [incident["kind"] for incident in result.incidents] == [kind], result.story()
    assert_same_outcome(result, reference)
    started = [event["rank"] for event in result.events if event["event"] == "rank_started"]
    assert [started.count(rank) for rank in (0, 1)] == processes


@pytest.mark.parametrize("phase", ["forward", "before_step", "backward"])
def test_failed_memory_of_fsdp2_is_repaired_in_the_same_process_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, phase: str
) -> None:
    arguments = ["--layout=fsdp2", "--blocks=3", "--steps=9"]
    reference = undisturbed(LAYOUTS, 2, script_args=arguments, device=NPU)

    result = run_ttprun(LAYOUTS, 2, faults=[f"uce-high:rank=1,step=6,phase={phase}"], script_args=arguments, device=NPU)

    assert_recovered_by(result, ["rerun"])
    assert_same_outcome(result, reference)


def test_a_replacement_that_comes_before_the_lost_ones_memory_is_tried_again_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--layout=own", "--width=256"]
    reference = undisturbed(LAYOUTS, 2, script_args=arguments, device=NPU)
    monkeypatch.setenv("SIMULATED_NPU_MEMORY_BYTES", str(ROOM_FOR_ONE))

    result = run_ttprun(LAYOUTS, 2, faults=["kill:rank=1,step=8,phase=backward"], script_args=arguments, device=NPU)

    assert result.final == reference.final, result.story()
    assert all(incident["outcome"] == "recovered" for incident in result.incidents), result.story()
    assert "its device has no memory for it yet" in result.output, result.story()


@pytest.mark.parametrize(("room", "is_protected"), [(124_000_000, False), (1 << 30, True)])
def test_the_journal_takes_what_the_script_leaves_free_on_its_device_and_never_its_own(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, room: int, is_protected: bool
) -> None:
    """Under torchrun a rank takes 121 MB; with copies of its gradients 146."""
    arguments = ["--layout=own", "--width=512", "--steps=6"]
    reference = undisturbed(LAYOUTS, 2, script_args=arguments, device=NPU)
    monkeypatch.setenv("SIMULATED_NPU_MEMORY_BYTES", str(room))

    result = run_ttprun(LAYOUTS, 2, script_args=arguments, device=NPU)

    assert_same_outcome(result, reference)
    reasons = {event["reason"] for event in result.events if event["event"] == "rank_unprotected"}
    assert not reasons if is_protected else all(re.search(r"more than the \d+ MiB that", reason) for reason in reasons)
    assert bool(reasons) != is_protected, result.story()


KILLS = ["kill:rank=1,step=12,phase=backward", "kill:rank=0,step=15,phase=collective"]
EARLY = ["kill:rank=1,step=2,phase=backward", "kill:rank=0,step=3,phase=collective"]
LIMIT = ["--journal-limit-mib", "32"]


@pytest.mark.parametrize(
    ("layout", "ranks", "blocks", "options", "faults", "most"),
    [
        ("hsdp", 4, 16, LIMIT, [], 1.02),  # a step reduces 64 MB of gradients to 32 MB of shards, which two ranks share
        ("hsdp", 4, 16, LIMIT, [KILLS[0], "kill:rank=2,step=15,phase=collective"], 0),
        ("fsdp2", 2, 16, LIMIT, [], 1.02),  # 64 MB of weights; a step gathers and reduces 190 MB
        ("fsdp1", 2, 16, [], [], 1.02),
        ("fsdp1", 4, 16, [], KILLS, 0),  # which divides twice
        ("ddp", 2, 6, [], [], 1.02),
        ("ddp", 2, 6, [], EARLY, 0),
    ],
)
def test_nothing_of_a_step_is_held_twice_on_a_device_and_a_lost_rank_is_replaced_all_the_same(
    run_ttprun: RunTtprun,
    undisturbed: Undisturbed,
    layout: str,
    ranks: int,
    blocks: int,
    options: list[str],
    faults: list[str],
    most: float,
) -> None:
    """Copies of what is gathered, and of gradients, took as much memory again."""
    steps = 8 if blocks < 16 else 20
    arguments = [f"--layout={layout}", "--width=212", f"--blocks={blocks}", f"--steps={steps}", "--with=peak"]
    reference = undisturbed(LAYOUTS, ranks, script_args=arguments, device=NPU)

    result = run_ttprun(LAYOUTS, ranks, faults=faults, script_args=arguments, options=options, device=NPU)

    assert result.final == reference.final, result.story()
    assert [incident["steps_lost"] for incident in result.incidents] == [0] * len(faults), result.story()
    assert not [event for event in result.events if event["event"] == "rank_unprotected"], result.story()
    if most:
        ours, theirs = (int(re.findall(r"peak (\d+) bytes", "".join(run.stdout[0]))[0]) for run in (result, reference))
        assert ours <= most * theirs


@pytest.mark.parametrize(
    ("what", "said"),
    [("mps", "CUDA's MPS serves this machine's GPUs"), ("nvshmem", "the script has loaded NVSHMEM")],
)
def test_mps_and_nvshmem_beside_the_script_end_protection_by_name(
    run_ttprun: RunTtprun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str, said: str
) -> None:
    """A file that is mapped stands for a library that is loaded, another one for the daemon's pipe."""
    library, script = tmp_path / "libnvshmem_host.so.3", tmp_path / "loads_a_library.py"
    library.write_bytes(b"library")
    maps = f"mapped = mmap.mmap(os.open({str(library)!r}, os.O_RDONLY), 0, prot=mmap.PROT_READ)"
    loads = f"import mmap\nimport os\n\n{maps}\n" if what == "nvshmem" else ""
    script.write_text(loads + (SCRIPTS / LAYOUTS).read_text())
    (tmp_path / "around_the_loop.py").symlink_to(SCRIPTS / "around_the_loop.py")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if what == "mps":
        (tmp_path / "control").touch()

    result = run_ttprun(str(script), 2, script_args=["--steps=6"], device=NPU)

    assert result.exit_code == 0, result.story()
    reasons = [event["reason"] for event in result.events if event["event"] == "rank_unprotected"]
    assert reasons, result.story()
    assert all(reason.startswith(said) for reason in reasons), result.story()
