"""A boundary's record, read from a recorder or a checkpoint."""

from __future__ import annotations

from typing import Any

from ttprun.rank.values import unpack


class Record:
    """A boundary's record, unpacked.

    fields   of its head
    blobs    bytes of each
    """

    def __init__(self, fields: dict[str, Any], blobs: list[memoryview]) -> None:
        self.fields = fields
        self.blobs = blobs

    @classmethod
    def of(cls, head: bytes, blobs: bytes) -> Record:
        """Unpack a record as a recorder returns it.

        head    the packed plain part
        blobs   all of them, one after the other
        """
        fields = unpack(head)
        found, at = [], 0
        for size in fields["blobs"]:
            found.append(memoryview(blobs)[at : at + size])
            at += size
        return cls(fields, found)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]
