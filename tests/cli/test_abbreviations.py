"""Abbreviated options: every one that works with torchrun works here, and means the same."""

import re
from collections.abc import Iterator

import pytest
from torch.distributed.run import get_args_parser

from ttprun.cli.command_line import build_parser, take_options
from ttprun.errors import ConfigError

# An option's own lines in the help are indented by two; others speak of it inside their texts.
HELP = "".join(re.findall(r"^  -.*$", get_args_parser().format_help(), re.MULTILINE))
OPTIONS = sorted(set(re.findall(r"--[a-z][a-z_-]+", HELP)))
FLAGS = {name for name, value in vars(get_args_parser().parse_args(["x"])).items() if isinstance(value, bool)}
VALUES = {"start_method": "fork", "numa_binding": "node"}


def words(option: str, spelling: str) -> list[str]:
    """A command line that gives `option`, spelt `spelling`, a value that it takes."""
    dest = option.removeprefix("--").replace("-", "_")
    return [spelling, "x.py"] if dest in FLAGS else [spelling, VALUES.get(dest, "3"), "x.py", spelling]


def prefixes() -> Iterator[tuple[str, str]]:
    for option in OPTIONS:
        if option != "--help":
            yield from ((option, option[:length]) for length in range(3, len(option) + 1))


def torchrun_reads(line: list[str]) -> dict[str, object] | None:
    try:
        return vars(get_args_parser().parse_args(line))
    except SystemExit:
        return None


def we_read(line: list[str]) -> dict[str, object] | None:
    arguments, unknown = build_parser().parse_known_args(line)
    files, ours = take_options(arguments)
    assert (unknown, files, ours) == ([], [], {})
    return vars(arguments)


def test_the_list_of_options_is_torchruns() -> None:
    dests = {option.removeprefix("--").replace("-", "_") for option in OPTIONS} - {"help"}

    assert dests == vars(get_args_parser().parse_args(["x"])).keys() - {"training_script", "training_script_args"}


def test_every_abbreviation_that_torchrun_takes_means_the_same_here() -> None:
    lines = [words(option, prefix) for option, prefix in prefixes()]
    expected = [(line, torchrun_reads(line)) for line in lines]
    accepted = [(line, namespace) for line, namespace in expected if namespace is not None]

    assert len(accepted) > 300
    assert [line for line, namespace in accepted if we_read(line) != namespace] == []


@pytest.mark.parametrize(
    "line", [["-r3", "x.py"], ["-t", "3", "x.py"], ["-m", "x", "-m"], ["--nproc-per-node=3", "x.py"]]
)
def test_short_options_and_equals_signs_mean_the_same_here(line: list[str]) -> None:
    assert we_read(line) == torchrun_reads(line)


@pytest.mark.parametrize("spelling", ["--allow-faults", "--allow_faults", "--allow", "--al"])
def test_our_options_may_be_abbreviated_and_written_with_underscores(spelling: str) -> None:
    arguments = build_parser().parse_args([spelling, "x.py"])

    assert take_options(arguments) == ([], {"allow_faults": True})


def test_an_underscore_in_a_value_stays() -> None:
    arguments = build_parser().parse_args(["--run_i=a_b", "x.py"])

    assert take_options(arguments) == ([], {"run_id": "a_b"})


def test_an_abbreviation_that_is_ambiguous_for_torchrun_is_so_here() -> None:
    with pytest.raises(ConfigError, match="ambiguous option: --rdzv"):
        build_parser().parse_args(["--rdzv", "x", "x.py"])


def test_what_follows_the_script_is_the_scripts_even_if_it_looks_like_an_abbreviation_of_ours() -> None:
    line = ["--nproc-per-node", "2", "--no-python", "train.py", "--n", "800", "--re", "-1", "--", "--help-me=no"]

    arguments, unknown = build_parser().parse_known_args(line)

    assert unknown == []
    assert (arguments.nproc_per_node, arguments.no_python, arguments.training_script) == ("2", True, "train.py")
    assert arguments.training_script_args == line[4:]
