"""Scenario files: whole ones, and what is said of those that cannot be used."""

from pathlib import Path

import pytest

from ttprun.chaos.trial.drill import command_of, launch_of, read_scenario
from ttprun.errors import ConfigError

DRILLS = Path(__file__).resolve().parents[2] / "configs" / "drills"
SMALL = "script: train.py\nfaults:\n  - kill:rank=1,step=5\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


def written(place: Path, text: str) -> str:
    (place / "s.yaml").write_text(text)
    return str(place / "s.yaml")


@pytest.mark.parametrize("name", sorted(path.name for path in DRILLS.glob("*.yaml")))
def test_every_example_can_be_used(name: str) -> None:
    scenario = read_scenario(str(DRILLS / name))

    assert Path(scenario.script).is_file()
    assert scenario.faults


def test_a_scenario_needs_a_script_and_faults_alone(place: Path) -> None:
    scenario = read_scenario(written(place, SMALL))

    assert scenario.script == str(place / "train.py")
    assert scenario.twin == "torchrun"
    assert scenario.compare_output


def test_each_twin_gets_its_own_folder_and_only_one_gets_the_faults(place: Path) -> None:
    scenario = read_scenario(written(place, SMALL + "arguments: [--out, '{folder}/out']\n"))

    disturbed, undisturbed = (launch_of(scenario, place, kind).words(place) for kind in ("disturbed", "torchrun"))

    assert command_of(scenario, Path("/x"))[1:] == ["--out", "/x/out"]
    assert disturbed[2] == "ttprun"
    assert "kill:rank=1,step=5" in (place / "settings.yaml").read_text()
    assert undisturbed[2:6] == ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    assert "--config" not in undisturbed


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("faults: [kill:rank=1]", "script: missing; add it (the training script; relative to this file)"),
        ("script: train.py", "faults: missing; add it (faults to cause, each as kill:rank=1,step=5,phase=backward)"),
        (SMALL + "compar: [x]", "compar: unknown; did you mean 'compare'?"),
        ("script: trian.py\nfaults: [kill:rank=1]", "/trian.py'; give its path relative to the scenario"),
        ("script: train.py\nfaults: []", "faults: [] is not valid; List should have at least 1 item"),
        (
            "script: train.py\nfaults: [kill:rank=1,step=5]",
            "faults: 'step=5' is part of a fault; write faults one a line",
        ),
        ("script: train.py\nfaults: [kil:rank=1]", "faults: there is no fault 'kil'; did you mean 'kill'?"),
        ("script: train.py\nfaults: ['agent-kill:after=3']", "ends the whole run; use inject-fault for it"),
        ("script: train.py\nfaults: ['kill:rank=1,every=5s']", "has no end, and a drill must have one; add a count"),
        (SMALL + "twin: mpirun", "twin: 'mpirun' is not valid; it should be 'torchrun' or 'ttprun'"),
        (SMALL + "limit_s: 0", "limit_s: 0 is not valid; it should be greater than 0"),
        (SMALL + "arguments: [--steps, 5]", "arguments.1: 5 is not valid; it should be a valid string"),
        (SMALL + "compare_output: false", "compare: nothing is to be compared"),
        (SMALL + "ttprun: {standbies: 2}", "ttprun: standbies: unknown; did you mean 'standbys'?"),
        (SMALL + "ttprun: {run_dir: x}", "ttprun: run_dir is set by the drill; take it out of this section"),
        (SMALL + "directory: nowhere", "/nowhere'; give its path relative to the scenario"),
        ("- 1", "is not a mapping; write one 'key: value' a line"),
        ("a: [", "is not valid YAML ("),
    ],
)
def test_a_scenario_that_cannot_be_used_is_answered_in_one_line(place: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_scenario(written(place, text))

    assert complaint in str(error.value)
    assert "s.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_scenario_that_is_not_there_is_answered_in_one_line(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\); give a YAML file"):
        read_scenario(str(place / "none.yaml"))
