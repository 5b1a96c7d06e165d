"""What a launch runs: whose package is the program's own, and which commands are Python scripts."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from ttprun.cli.command_line import Program, find_program, for_another_interpreter, module_of, why_no_script_of_ours

WRAPPER = """\
import re
import sys
from trainer.cli import main
if __name__ == '__main__':
    sys.exit(main())
"""


def launch(script: str, no_python: bool = False, module: bool = False, arguments: tuple[str, ...] = ()) -> Namespace:
    given = {"training_script": script, "training_script_args": list(arguments), "no_python": no_python}
    return Namespace(**given, module=module, run_path=False)


def executable(path: Path, first_line: str, rest: str = WRAPPER) -> str:
    path.write_text(f"{first_line}\n{rest}")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "site-packages" / "trainer"
    found.mkdir(parents=True)
    (found / "__init__.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.syspath_prepend(str(found.parent))
    return found


def test_the_package_of_an_installed_module_is_the_programs_own(package: Path) -> None:
    assert find_program(launch("trainer.cli", module=True)) == Program(own=(str(package),))


def test_a_module_of_the_working_folder_needs_nothing(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)

    assert find_program(launch("trainer.cli", module=True)) == Program()


@pytest.mark.parametrize("module", ["torch.distributed.run", "timeit", "no_such_package.at_all", "accelerate.thing"])
def test_a_module_of_a_library_is_nobodys_own(module: str) -> None:
    assert find_program(launch(module, module=True)) == Program()


@pytest.mark.parametrize(
    "first_line",
    [
        f"#!{sys.executable}",
        f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''",
    ],
)
def test_a_console_script_is_run_as_a_script_and_its_package_is_its_own(
    package: Path, tmp_path: Path, first_line: str
) -> None:
    command = executable(tmp_path / "train-it", first_line)

    assert find_program(launch(command, no_python=True)) == Program(command, (str(package),))


def test_a_command_with_code_of_its_own_names_no_package(tmp_path: Path) -> None:
    script = executable(
        tmp_path / "train-it", f"#!{sys.executable}", "from trainer.cli import x\nfor i in x:\n    i()\n"
    )

    assert module_of(script) == ""


@pytest.mark.parametrize(
    ("first_line", "why_not"),
    [
        ("\x7fELF", "not a Python script: its file does not begin with #!"),
        ("#!/bin/bash", "one for /bin/bash"),
        (f"#!{sys.executable} -I", "its Python is started with -I"),
        ("#!/opt/other/bin/python3", "another Python (/opt/other/bin/python3); install ttprun there"),
    ],
)
def test_a_command_that_is_no_script_for_this_python_is_left_alone_with_the_reason(
    tmp_path: Path, first_line: str, why_not: str
) -> None:
    assert why_not in why_no_script_of_ours(executable(tmp_path / "train-it", first_line))


def test_a_shell_script_that_ends_in_python_is_told_what_to_start_instead(tmp_path: Path) -> None:
    script = executable(tmp_path / "train.sh", "#!/bin/sh", 'export LR=1\nexec python -u train.py "$@"\n')

    assert "start 'ttprun train.py \"$@\"' instead" in why_no_script_of_ours(script)


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (("train.py", "--lr", "1"), Program("train.py", words=1)),
        (("-u", "train.py"), Program("train.py", words=2)),
        (("-m", "train"), Program(why_not="it is Python itself: leave out --no-python and python")),
    ],
)
def test_a_script_of_this_python_is_run_as_without_no_python(arguments: tuple[str, ...], program: Program) -> None:
    assert find_program(launch(sys.executable, no_python=True, arguments=arguments)) == program


@pytest.mark.parametrize(
    ("text", "interpreter"),
    [
        ("#!/bin/bash\necho $LR", "/bin/bash"),
        ("echo $LR", "a shell"),
        ("#!/bin/sh\n'''exec' python \"$0\" \"$@\"\n'''\nx = 1", ""),
        ("#!/usr/bin/env python3\n(", ""),
    ],
)
def test_a_script_for_another_interpreter_is_known_if_python_cannot_read_it(
    tmp_path: Path, text: str, interpreter: str
) -> None:
    (tmp_path / "train.sh").write_text(text)

    assert for_another_interpreter(str(tmp_path / "train.sh")) == interpreter


def test_the_python_of_the_environment_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))

    assert why_no_script_of_ours(executable(tmp_path / "x", f"#!/usr/bin/env {os.path.basename(sys.executable)}")) == ""
