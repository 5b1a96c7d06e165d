"""One file: what is hashed is what is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from ttprun.state.files import read_entry, write_file


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
