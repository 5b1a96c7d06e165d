"""A record as a tree: what belongs to which variable."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.capture.records import record_of
from tests.capture.user_values import Meter
from ttprun.capture import values
from ttprun.capture.values import Snapshot
from ttprun.capture.values.trees import name_of_blob


def test_each_blob_is_named_by_the_variable_that_holds_it() -> None:
    engine = Meter()
    engine.buffers = {"even": [torch.ones(4), torch.arange(4_000.0)]}  # type: ignore[attr-defined]
    scope: dict[str, Any] = {"step": 3, "engine": engine, "norm": nn.BatchNorm1d(8), "again": engine}
    values.begin_boundary()
    snapshot = Snapshot({})
    record = record_of(variables=[snapshot.variables(scope)], modules={"data": {}})

    names = {name_of_blob(record, index): blob.nbytes for index, blob in enumerate(snapshot.blobs)}

    assert names["engine.buffers['even'][1]"] == 16_000
    assert sum(size for name, size in names.items() if name == "norm") > 0
    assert "" not in names
    assert name_of_blob(record, len(snapshot.blobs)) == ""
