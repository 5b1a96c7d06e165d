"""How much memory can still be taken, as the machine and control groups of both versions say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttprun.tensors.memory import free_bytes

MIB = 1 << 20
NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def machine(folder: Path, free_mib: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal: 999999 kB\nMemFree: 1 kB\nMemAvailable:   {free_mib << 10} kB\n")
    return path


def group(folder: Path, version: int, limit: str, used: int, cached: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, used_name, cached_name = NAMES[version]
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cached_name} {cached}\nslab 7\n")
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_the_control_group_holds_if_it_is_nearer_than_the_machine_s(tmp_path: Path, version: int) -> None:
    ours = group(tmp_path / "ours", version, str(100 * MIB), used=60 * MIB)

    assert free_bytes(machine(tmp_path, 500), ours) == 40 * MIB
    assert free_bytes(machine(tmp_path, 30), ours) == 30 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_page_cache_that_nobody_needs_is_free(tmp_path: Path, version: int) -> None:
    ours = group(tmp_path / "ours", version, str(100 * MIB), used=100 * MIB, cached=70 * MIB)

    assert free_bytes(machine(tmp_path, 500), ours) == 70 * MIB


def test_a_group_without_a_limit_lies_in_one_that_has_one(tmp_path: Path) -> None:
    outer = group(tmp_path / "outer", 2, str(50 * MIB), used=20 * MIB)
    ours = group(outer / "ours", 2, "max", used=10 * MIB)

    assert free_bytes(machine(tmp_path, 500), ours) == 30 * MIB


def test_a_group_beyond_its_limit_has_nothing_free(tmp_path: Path) -> None:
    ours = group(tmp_path / "ours", 2, str(50 * MIB), used=60 * MIB)

    assert free_bytes(machine(tmp_path, 500), ours) == 0


def test_where_nothing_reports_it_it_is_not_known(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "none", tmp_path) is None
