"""Where settings come from, which of them wins, and what is said about wrong ones."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ttprun.config import Config
from ttprun.config_sources import ConfigSource, read_config_file, resolve
from ttprun.errors import ConfigError, ConfigErrors


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_the_default_preset_shows_every_key_with_its_default() -> None:
    preset = read_config_file("default")

    assert list(preset.values) == list(Config.model_fields)
    assert resolve([preset], {}, {}) == Config()


def test_options_beat_variables_beat_later_files_beat_earlier_files(tmp_path: Path) -> None:
    text = "standbys: 2\nrun_id: a\nrungs: [restart]\nrecord_limit_mib: 8"
    first = read_config_file(write(tmp_path / "a.yaml", text))
    second = read_config_file(write(tmp_path / "b.yaml", "standbys: 3\nrun_id: b\nrungs: [restart]"))

    config = resolve([first, second], {"TTPRUN_STANDBYS": "4", "TTPRUN_RUN_ID": "c"}, {"standbys": "5"})

    assert (config.standbys, config.run_id, config.rungs, config.record_limit_mib) == (5, "c", ["restart"], 8)


def test_launch_options_of_several_files_are_merged_one_by_one(tmp_path: Path) -> None:
    first = read_config_file(write(tmp_path / "a.yaml", "launch: {nproc-per-node: 2, max_restarts: 1}"))
    second = read_config_file(write(tmp_path / "b.yaml", "launch: {nproc_per_node: 3}"))

    config = resolve([first, second], {}, {})

    assert config.launch == {"nproc_per_node": 3, "max_restarts": 1}


def test_variables_hold_lists_as_words_and_paths() -> None:
    environment = {
        "TTPRUN_FAULTS": "kill:rank=1 exit:rank=0,step=3",
        "TTPRUN_USER_PATHS": "/a:/b",
        "TTPRUN_FOLLOW": "mytrainer.loop other",
        "TTPRUN_ALLOW_FAULTS": "1",
        "TTPRUN_RUN_ID": "",
        "TTPRUN_RETRY_ON": "OutOf|Connection reset, by peer",
        "TTPRUN_AGENT_PID": "7",
    }

    config = resolve([], environment, {})

    assert config.faults == ["kill:rank=1", "exit:rank=0,step=3"]
    assert config.retry_on == ["OutOf|Connection reset, by peer"]
    assert config.user_paths == ["/a", "/b"]
    assert config.follow == ["mytrainer.loop", "other"]
    assert config.allow_faults
    assert config.run_id is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("stanbys: 2", "stanbys: unknown; did you mean 'standbys'?"),
        ("launch: 3", "launch: is not a mapping; write torchrun's options as 'name: value'"),
        ("launch: {tee: null}", "launch: tee is None; give a number, a string, true, false or a list of strings"),
        ("device_errors: {'(': link}", "device_errors: '(' is not a regular expression; correct it (missing ), unter"),
        ("device_errors: {x: linc}", "device_errors: 'x' is 'linc', which is not a fault; use one of memory-temporary"),
        ("faults: ['kil:rank=1']", "faults: there is no fault 'kil'; did you mean 'kill'?"),
        ("standbys: two", "standbys: 'two' is not valid; it should be a valid integer (processes kept ready"),
        ("standbys: 65", "standbys: 65 is not valid; it should be less than or equal to 64"),
        ("freeze_timeout_s: 0", "freeze_timeout_s: 0 is not valid; it should be greater than 0"),
        ("follow: [my-trainer]", "follow: 'my-trainer' is not a module's name; write it as after 'import', such as"),
        ("run_id: ../../etc", "run_id: '../../etc' is not valid; it should match pattern"),
    ],
)
def test_a_wrong_file_is_answered_in_one_line_that_names_file_key_and_cure(
    tmp_path: Path, text: str, complaint: str
) -> None:
    file = write(tmp_path / "job.yaml", text)

    with pytest.raises(ConfigError) as error:
        resolve([read_config_file(file)], {}, {})

    assert str(error.value).startswith(f"{file}: {complaint}")
    assert "\n" not in str(error.value)


def test_everything_that_is_wrong_is_named_at_once_a_line_each(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "stanbys: 2\nrungs: [replac, restart, fial]\nfreeze_timeout_s: 0\nrun_id: a/b")
    second = write(tmp_path / "b.yaml", "buddy: maybe\nnproc_per_node: 4\nhang_timeout_s: soon")
    environment = {"TTPRUN_STANDBYS": "two", "TTPRUN_LAUNCH": "x", "TTPRUN_KEEP_RUN": "1"}

    with pytest.raises(ConfigErrors) as error:
        resolve([read_config_file(first), read_config_file(second)], environment, {"http": "x", "proof": "none"})

    assert [str(one).partition("; ")[0].removeprefix(f"{tmp_path}/") for one in error.value.parts] == [
        "TTPRUN_LAUNCH is not a variable of ttprun",
        "a.yaml: stanbys: unknown",
        "a.yaml: run_id: 'a/b' is not valid",
        "a.yaml: rungs.0: 'replac' is not valid",
        "a.yaml: rungs.2: 'fial' is not valid",
        "a.yaml: freeze_timeout_s: 0 is not valid",
        "b.yaml: nproc_per_node: unknown",
        "b.yaml: buddy: 'maybe' is not auto, on, node or off",
        "b.yaml: hang_timeout_s: 'soon' is not valid",
        "TTPRUN_KEEP_RUN: unknown",
        "TTPRUN_STANDBYS: 'two' is not valid",
        "--proof: 'none' is not valid",
        "--http: 'x' is no address",
    ]
    assert str(error.value).splitlines() == [str(one) for one in error.value.parts]


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("TTPRUN_STANBYS", "2", "TTPRUN_STANBYS: unknown; did you mean 'TTPRUN_STANDBYS'?"),
        ("TTPRUN_STANDBY_DEPTH", "imports", "TTPRUN_STANDBY_DEPTH: unknown; it was removed, leave it out: a"),
        ("TTPRUN_STANDBYS", "two", "TTPRUN_STANDBYS: 'two' is not valid; it should be a valid integer"),
        ("TTPRUN_RUNGS", "replace,restat", "TTPRUN_RUNGS: 'restat' is not valid; it should be"),
        (
            "TTPRUN_LAUNCH",
            "x",
            "TTPRUN_LAUNCH is not a variable of ttprun; set torchrun's own, such as PET_NPROC_PER_NODE",
        ),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve([], {variable: value}, {})

    assert str(error.value).startswith(complaint)


def test_a_wrong_option_is_named_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match=r"^--record-limit-mib: '0' is not valid; it should be greater than"):
        resolve([], {}, {"record_limit_mib": "0"})
    with pytest.raises(ConfigError, match=r"^--fault: fault 'kill' names no rank; "):
        resolve([], {}, {"faults": ["kill"]})
    with pytest.raises(ConfigError, match=r"^--follow: 'trainer\.' is not a module's name; write it as after 'import'"):
        resolve([], {}, {"follow": ["trainer."]})


def test_faults_must_be_allowed_by_some_source() -> None:
    with pytest.raises(ConfigError, match=r"^fault 'kill:rank=1' is not allowed in this run; add --allow-faults$"):
        resolve([], {}, {"faults": ["kill:rank=1"]})

    allowed = resolve([], {"TTPRUN_ALLOW_FAULTS": "yes"}, {"faults": ["kill:rank=1"]})

    assert allowed.faults == ["kill:rank=1"]


def test_a_preset_is_used_when_there_is_no_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "debug").mkdir()
    write(tmp_path / "torchrun", "standbys: 7")

    assert resolve([read_config_file("debug")], {}, {}).allow_faults
    assert resolve([read_config_file("torchrun")], {}, {}).standbys == 7


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("debgu", "--config: there is no file 'debgu'; did you mean 'debug'?"),
        (
            "no.yaml",
            "--config: there is no file 'no.yaml'; give a file, or one of the presets debug, ",
        ),
        ("list.yaml", "--config: 'list.yaml' is not a mapping; write one 'key: value' a line"),
        ("open.yaml", "--config: 'open.yaml' is not valid YAML ("),
        ("bytes.yaml", "--config: 'bytes.yaml' cannot be read ("),
    ],
)
def test_a_file_that_is_no_configuration_is_answered_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "list.yaml", "- 1")
    write(tmp_path / "open.yaml", "a: [1\nb: 2")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")

    with pytest.raises(ConfigError) as error:
        read_config_file(name)

    assert str(error.value).startswith(complaint)
    assert "\n" not in str(error.value)


def test_an_installed_package_finds_the_presets_that_are_packed_with_it(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    package = tmp_path / "site" / "ttprun"
    shutil.copytree(root / "configs", package / "configs")
    for module in ("config.py", "config_sources.py", "errors.py"):
        shutil.copy(root / "ttprun" / module, package)
    for part in ("chaos", "device"):
        shutil.copytree(root / "ttprun" / part, package / part)
    program = (
        "from ttprun.config_sources import read_config_file; print(read_config_file('debug').values['allow_faults'])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "True\n"


def test_of_a_file_with_a_ttprun_section_only_that_section_is_ours(tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", "lr: 0.1\nttprun: {standbys: 3}")

    assert read_config_file(file) == ConfigSource("file", file, {"standbys": 3})


def test_a_range_of_nodes_is_not_read_as_a_number_of_minutes(tmp_path: Path) -> None:
    file = write(tmp_path / "job.yaml", "launch: {nnodes: 1:4, tee: 3, monitor_interval: 5e-1, rdzv_id: 0012}")

    launch = resolve([read_config_file(file)], {}, {}).launch

    assert launch == {"nnodes": "1:4", "tee": 3, "monitor_interval": 0.5, "rdzv_id": "0012"}


def test_the_resolved_configuration_can_be_read_again(tmp_path: Path) -> None:
    launch = {"nnodes": "1:4", "rdzv_id": "0012", "standalone": True, "duplicate_stdout_filters": ["a,b", "c"]}
    config = Config(run_id="01", faults=["kill:rank=1"], allow_faults=True, launch=launch, freeze_timeout_s=0.5)

    file = write(tmp_path / "config.yaml", config.to_yaml())

    assert resolve([read_config_file(file)], {}, {}) == config


def test_configuration_and_observation_import_no_torch() -> None:
    parts = (
        "config",
        "device.device_errors",
        "chaos.injected_faults",
        "observe.run_directory",
        "observe.events",
        "observe.status",
    )
    modules = ", ".join(f"ttprun.{part}" for part in parts)

    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; sys.exit('torch' in sys.modules)"], check=False
    )

    assert done.returncode == 0


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("buddy: on", "on"),
        ("buddy: off", "off"),
        ("buddy: node", "node"),
    ],
)
def test_whether_mirrors_are_kept_is_a_word_that_yaml_may_read_as_true_or_false(
    tmp_path: Path, text: str, mode: str
) -> None:
    config = resolve([read_config_file(write(tmp_path / "a.yaml", text))], {}, {})

    assert config.buddy == mode
    assert resolve([read_config_file(write(tmp_path / "b.yaml", config.to_yaml()))], {}, {}) == config
