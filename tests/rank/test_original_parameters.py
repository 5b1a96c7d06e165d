"""FSDP1's original parameters: which part of a flat parameter each has, whatever stands in its place."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.rank.processes import run_alone
from ttprun.introspect import model_tensors
from ttprun.rank.step import record

SHARDED, WHOLE = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD


def made(strategy: ShardingStrategy) -> Any:
    """A layer of FSDP1 on the second of two ranks, after a forward pass; collectives do nothing."""
    FlatParamHandle.__init__ = model_tensors.wrap_init(FlatParamHandle.__init__)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    layer = torch.nn.Linear(6, 4)
    model = FullyShardedDataParallel(
        layer, device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=True
    )
    model(torch.ones(1, 6)).sum().backward()
    return model


def look(strategy: ShardingStrategy) -> list[Any]:
    """(size, whether it is known and is the parameter's memory, size while all is gathered) of weight and bias."""
    model = made(strategy)
    parameters = list(model.parameters())
    rest = [model_tensors.at_rest(one) for one in parameters]
    are_views = [part.data_ptr() == one.data_ptr() for part, one in zip(rest, parameters, strict=True)]
    unknown = [model_tensors.is_gathered_in_place(one) for one in parameters]
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        gathered = [model_tensors.at_rest(one) for one in parameters]
        wholes = [one.numel() for one in parameters]
    are_same = [torch.equal(one, part) for one, part in zip(gathered, rest, strict=True)]
    return [[part.numel() for part in rest], wholes, *map(all, (are_views, are_same)), any(unknown)]


@pytest.mark.parametrize(("strategy", "sizes"), [(SHARDED, [10, 4]), (WHOLE, [24, 4])], ids=["sharded", "whole"])
def test_the_part_of_a_rank_is_known_also_while_the_whole_stands_in_its_place(
    strategy: ShardingStrategy, sizes: list[int]
) -> None:
    """28 elements, 14 a rank: the second one has 10 of the weight, and the bias."""
    assert run_alone(look, strategy) == [sizes, [24, 4], True, True, False]


def dropped() -> list[Any]:
    parameters = list(made(SHARDED).parameters())
    known = [model_tensors.part_of(one) is not None for one in parameters]
    dist.destroy_process_group()
    gc.collect()
    return [known, [model_tensors.part_of(one) for one in parameters]]


def test_parameters_whose_flat_one_is_gone_and_others_have_no_part() -> None:
    assert run_alone(dropped) == [[True, True], [None, None]]
    assert model_tensors.part_of(torch.nn.Parameter(torch.ones(2))) is None


def test_one_whose_part_is_not_known_is_refused_with_the_reason() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert not record.why_shards_unknown(optimizer)

    parameter._fsdp_flattened = True  # as FSDP1 marks them

    assert "FSDP1's parameters this rank holds is not known" in record.why_shards_unknown(optimizer).text
