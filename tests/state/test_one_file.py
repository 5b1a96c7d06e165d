"""One file: what is hashed is what is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from tests.state.making import run_program
from tests.state.test_places_that_cannot_be_written import namespace
from ttprun.state.files import read_entry, write_file

BLOCK, BUFFER = 4096, 8 << 20
# On a file system that refuses to be written past the page cache.
WRITE_ON_RAMFS = """
import subprocess, sys
from pathlib import Path
from ttprun.state.files import read_entry, write_file

folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "ramfs", "ramfs", folder], check=True)
entry = write_file(folder / "file", [b"x" * 20_000_000])
print(entry == read_entry(folder / "file"), entry.bytes)
"""


def test_a_large_file_is_written_in_pieces_and_hashed_as_a_whole(tmp_path: Path) -> None:
    chunks = [os.urandom(1000) * 40_000, b"", bytearray(b"tail")]
    whole = b"".join(chunks)

    entry = write_file(tmp_path / "large", chunks)

    assert (tmp_path / "large").read_bytes() == whole
    assert (entry.bytes, entry.xxh3) == (len(whole), xxhash.xxh3_128_hexdigest(whole))
    assert read_entry(tmp_path / "large") == entry


def test_a_chunk_may_hold_elements_of_any_size_or_none(tmp_path: Path) -> None:
    numbers = memoryview(bytes(range(16))).cast("Q")

    entry = write_file(tmp_path / "file", [numbers, numbers[:0]])

    assert (tmp_path / "file").read_bytes() == bytes(range(16))
    assert entry.bytes == 16


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", [b"ours"])

    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, BUFFER - 1, BUFFER, BUFFER + BLOCK, 2 * BUFFER + 1]
)
def test_a_file_of_any_size_is_whole_whatever_the_disk_writes_at_a_time(tmp_path: Path, size: int) -> None:
    content = os.urandom(1 << 16) * (size // (1 << 16) + 1)

    entry = write_file(tmp_path / "file", [content[:size]])

    assert (tmp_path / "file").read_bytes() == content[:size]
    assert entry == read_entry(tmp_path / "file")


def test_content_that_comes_by_and_by_is_written_up_to_its_end(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(1000) * 20_000)
    fd = os.open(source, os.O_RDONLY)

    entry = write_file(tmp_path / "file", lambda buffer: os.readv(fd, [buffer[:300_001]]))
    os.close(fd)

    assert entry == read_entry(source) == read_entry(tmp_path / "file")


def test_an_error_in_the_content_comes_out_and_leaves_no_descriptor(tmp_path: Path) -> None:
    def fail(buffer: memoryview) -> int:
        raise OSError("gone")

    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="gone"):
        write_file(tmp_path / "file", fail)

    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_system_that_wants_its_page_cache_used_gets_the_same_file(tmp_path: Path) -> None:
    prefix = namespace()
    if prefix is None:
        pytest.skip("nothing may be mounted here")

    done = run_program(WRITE_ON_RAMFS, tmp_path, prefix=prefix)

    assert (done.stdout, done.stderr) == ("True 20000000\n", "")
