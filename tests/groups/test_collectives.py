"""Collectives and DDP over the managed process group: two real processes, and what plain gloo gives them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rank.collectives import CASES
from tests.rank.training import STYLES
from ttprun.groups.operations import OPERATIONS


@pytest.mark.parametrize("name", CASES)
def test_an_operation_gives_what_gloo_gives(name: str, gloo_and_ours: tuple[list[Any], list[Any]]) -> None:
    gloo, managed = gloo_and_ours

    expected, found = ([result[name] for result in results] for results in (gloo, managed))

    if "Error" in str(expected):
        assert [str(e).split(":")[0] for e in found] == [str(e).split(":")[0] for e in expected]
    else:
        assert found == expected


def test_every_operation_of_torchs_group_is_known() -> None:
    """A new release of torch may add one: it must be in OPERATIONS, or it goes past the journal."""
    from torch._C._distributed_c10d import Backend

    known = {*OPERATIONS, "send", "recv", "recv_anysource", "allreduce_sparse"}  # the last one: of backends only
    other = {
        "abort", "eager_connect_single_device", "get_error", "get_mem_allocator", "name", "options", "rank", "shutdown", "size",
        "supports_coalescing", "supports_splitting", "supports_time_estimate", "supports_tensor_alloc", "allocate_tensor",
        "comm_split_count", "_end_coalescing", "_start_coalescing", "_get_backend_name", "get_backend_name",
    }  # fmt: skip

    unknown = {
        name for name in vars(Backend) if not name.startswith("__") and name not in known | other
        and not name.startswith(("_set", "_get", "set", "supports", "_verify", "_wait", "bound_device", "mem_", "group_"))
    }  # fmt: skip

    assert {
        name for name in unknown if any(word in name for word in ("reduce", "gather", "scatter", "broadcast", "all_to"))
    } == set()


@pytest.mark.parametrize("how", STYLES)
def test_ddp_comes_to_the_weights_of_plain_gloo(how: str, gloo_and_ours: tuple[list[Any], list[Any]]) -> None:
    gloo, managed = gloo_and_ours

    assert [result[f"ddp {how}"] for result in managed] == [result[f"ddp {how}"] for result in gloo]
