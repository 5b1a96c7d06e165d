"""`ttprun diff`: which link of two traces is the first that differs, and what is said of it; files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ttprun.cli.main import main
from ttprun.errors import ConfigError
from ttprun.observe.run_directory import TRACE_HEAD, begin_trace, read_trace

STEP = "o11 p22 x33 u44 b55 q66 l77 v0.5 i88 g99 G0000ffff h00"


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join([TRACE_HEAD, *lines, ""]))
    return str(path)


def steps(changes: dict[str, str] | None = None, at: tuple[int, int] = (0, 2), counted: str = "1/1") -> list[str]:
    """Four steps of two ranks; in step and rank `at` the words that begin with these letters are others."""
    lines = []
    for step in range(4):
        for rank in (0, 1):
            is_other = (rank, step) == at
            words = [(changes or {}).get(word[0], word) if is_other else word for word in STEP.split()]
            words = [word if word[0] in "oqhiv" else f"{word}{step}" for word in words]
            lines.append(f"{rank} {step} {counted if is_other else '1/1'} {' '.join(words)}")
    names = {"parameters": ["embed.weight", "layers.3.mlp"]}
    return [f"@ {rank} 0 {json.dumps(names)}" for rank in (0, 1)] + lines


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"o": "o12"}, "step 2, rank 0: other random numbers than before"),
        ({"p": "p23", "l": "l78"}, "step 2, rank 0: same gradients, other weights or optimizer state after step 1"),
        ({"x": "x34", "b": "b56"}, "step 2, rank 0: other samples in the batch: the sampler"),
        ({"b": "b56", "l": "l78"}, "step 2, rank 0: another batch of the same samples"),
        (
            {"q": "q67", "l": "l78"},
            "step 2, rank 0: other random numbers before the batch is loaded: an evaluation",
        ),
        ({"l": "l78", "v": "v0.6", "i": "i89"}, "another loss (0.6 instead of 0.5): kernel"),
        ({"i": "i89", "G": "G0000fffe", "g": "g98"}, "other gradient of layers.3.mlp before ranks reduce it"),
        ({"g": "g98", "G": "G0001fffe"}, "other gradient of embed.weight, layers.3.mlp after the backward pass"),
        ({"h": "h01"}, "other settings of the optimizer"),
    ],
)
def test_the_first_link_that_differs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], said: str
) -> None:
    first, other = write(tmp_path / "a", *steps()), write(tmp_path / "b", *steps(changes))

    assert main(["diff", first, other]) == 1
    assert said in capsys.readouterr().out
    assert main(["diff", first, first]) == 0
    assert capsys.readouterr().out == "no difference in 4 steps of 2 ranks\n"


def test_a_batch_that_is_made_by_hand_is_not_called_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "a", "0 0 0/1 o1 p2 l3 v0.5 g4")
    other = write(tmp_path / "b", "0 0 0/1 o1 p2 l4 v0.6 g5")

    assert main(["diff", first, other]) == 1
    said = "step 0, rank 0: same random numbers and weights, another loss (0.6 instead of 0.5): a batch that no DataL"
    assert said.replace(", rank 0", "") in capsys.readouterr().out.replace(", rank 0", "")


def test_steps_that_are_taken_again_replace_the_former_ones_and_all_later_ones(tmp_path: Path) -> None:
    again = steps({"b": "b56"}, at=(1, 3))

    trace = read_trace(Path(write(tmp_path / "a", *again, "1 2 1/1 b555")))

    assert [*trace.steps[1]] == [0, 1, 2]
    assert [*trace.steps[0]] == [0, 1, 2, 3]


def test_a_part_of_a_last_line_that_a_killed_run_has_left_is_no_line(tmp_path: Path) -> None:
    trace = tmp_path / "a"
    write(trace, *steps())
    trace.write_text(trace.read_text() + "0 4 1/1 o1")

    assert max(read_trace(trace).steps[0]) == 3


def test_a_run_that_resumes_by_its_own_code_is_compared_from_the_step_whose_weights_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "a", *steps())
    later = [line.split(" ", 2) for line in steps({"x": "x34"}, at=(0, 2)) if line[0] != "@" and line.split()[1] > "1"]
    other = write(tmp_path / "b", *(f"{rank} {int(step) - 2} {rest}" for rank, step, rest in later))

    assert main(["diff", first, other]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "step 0 of the second run has the weights of step 2 of the first: compared from there",
        "step 2, rank 0: other samples in the batch: the order of the data after a resume",
    ]


def test_of_other_numbers_of_ranks_the_samples_of_all_together_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "a", "0 0 1/1 u00000030", "0 1 1/1 u00000050")
    two = write(tmp_path / "b", "0 0 1/1 u00000010", "1 0 1/1 u00000020", "0 1 1/1 u00000030", "1 1 1/1 u00000021")

    assert main(["diff", one, two]) == 1
    assert "step 1: other samples in the batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no trace can be read from"),
        (b"\xff\xfe\x00", "it is not text"),
        (b"import torch\n", "is not a trace"),
        (b"ttprun-trace 1\n0 0 1/1 b5\n", "is of another version of ttprun (ttprun-trace 1)"),
        (b"ttprun-trace 2\n0 0 1/1 b5\nhello\n", "line 3: this is not a line of a trace"),
        (b"ttprun-trace 2\n", "holds no step"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
) -> None:
    good = write(tmp_path / "a", *steps())
    if content is not None:
        (tmp_path / "b").write_bytes(content)

    assert main(["diff", good, str(tmp_path / "b")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_trace_of_a_run_is_known_by_the_runs_directory(tmp_path: Path) -> None:
    trace = write(tmp_path / "a", *steps())
    (tmp_path / "config.yaml").write_text(f"standbys: 1\ntrace: {trace}\nmindio: false\n")

    assert read_trace(tmp_path).steps == read_trace(Path(trace)).steps


def test_a_job_that_may_resume_adds_to_its_trace_and_any_other_begins_it_anew(tmp_path: Path) -> None:
    trace = write(tmp_path / "a", *steps())

    assert begin_trace(trace, may_resume=True) == trace
    assert len(read_trace(Path(trace)).steps[0]) == 4
    begin_trace(trace, may_resume=False)
    assert Path(trace).read_text() == f"{TRACE_HEAD}\n"
    script = tmp_path / "train.py"  # ttprun --trace train.py: the file was left out
    script.write_text("print()")
    with pytest.raises(ConfigError, match=r"--trace: '.*' is there, and is not a trace"):
        begin_trace(str(script), may_resume=False)
    assert script.read_text() == "print()"
    with pytest.raises(ConfigError, match=r"--trace: '.*' cannot be written"):
        begin_trace(str(tmp_path / "no" / "folder"), may_resume=False)
