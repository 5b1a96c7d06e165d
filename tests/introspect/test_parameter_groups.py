"""An optimizer's parameters, while an engine shows it a part of them."""

from __future__ import annotations

import gc
import weakref

import torch

from ttprun.introspect.model_tensors import all_of, how_many_shown, shown_to


def an_optimizer() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """(its four parameters, an optimizer with two of them in each of two groups), no step taken."""
    parameters = [torch.nn.Parameter(torch.full((2,), float(number))) for number in range(4)]
    optimizer = torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}])
    all_of(optimizer)  # as at its making
    return parameters, optimizer


def step(optimizer: torch.optim.Optimizer) -> None:
    for one in shown_to(optimizer):
        one.grad = torch.ones_like(one)
    optimizer.step()


def held(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """By group, the ids of its parameters."""
    return [[id(one) for one in group.parameters] for group in all_of(optimizer)]


def test_a_group_that_is_not_shown_keeps_its_place() -> None:
    parameters, optimizer = an_optimizer()
    whole = optimizer.param_groups
    ids = [list(map(id, parameters[:2])), list(map(id, parameters[2:]))]

    optimizer.param_groups = [whole[1]]

    assert held(optimizer) == ids
    assert how_many_shown(optimizer) == [None, 2]
    assert list(map(id, shown_to(optimizer))) == ids[1]
    assert [group.settings["lr"] for group in all_of(optimizer)] == [0.001, 0.5]
    optimizer.param_groups = whole
    assert held(optimizer) == ids
    assert how_many_shown(optimizer) == [2, 2]


def test_a_group_that_is_emptied_between_its_steps_keeps_its_parameters() -> None:
    parameters, optimizer = an_optimizer()
    ids = held(optimizer)

    for group in optimizer.param_groups:
        group["params"] = []
    assert held(optimizer) == ids
    assert how_many_shown(optimizer) == [0, 0]

    optimizer.param_groups[0]["params"] = [parameters[0]]
    step(optimizer)
    optimizer.param_groups[0]["params"] = [parameters[1]]
    step(optimizer)
    assert held(optimizer) == ids  # there is state of the first one
    assert how_many_shown(optimizer) == [1, 0]


def test_parameters_that_have_been_replaced_before_the_first_step_are_given_up() -> None:
    parameters, optimizer = an_optimizer()
    flat = torch.nn.Parameter(torch.zeros(4))

    optimizer.param_groups[0]["params"] = [flat]

    assert held(optimizer) == [[id(flat)], list(map(id, parameters[2:]))]


def test_groups_that_the_script_adds_removes_or_replaces_are_those_that_count() -> None:
    parameters, optimizer = an_optimizer()
    step(optimizer)
    added = torch.nn.Parameter(torch.zeros(3))

    optimizer.add_param_group({"params": [added]})
    assert held(optimizer)[2:] == [[id(added)]]
    optimizer.load_state_dict(optimizer.state_dict())  # makes new dicts
    assert held(optimizer)[2:] == [[id(added)]]
    del optimizer.param_groups[1]
    assert held(optimizer) == [list(map(id, parameters[:2])), [id(added)]]
    other = torch.nn.Parameter(torch.zeros(5))
    optimizer.param_groups[1]["params"][0] = other
    assert held(optimizer)[1] == [id(other)]
    optimizer.param_groups[0]["params"] = [parameters[0], other]  # there is still state of the second one
    assert held(optimizer)[0] == [id(parameters[0]), id(other)]


def test_an_optimizer_that_is_shown_the_same_costs_no_new_list() -> None:
    _, optimizer = an_optimizer()
    before = all_of(optimizer)

    step(optimizer)

    assert all_of(optimizer) is before


def test_an_optimizer_that_the_script_drops_is_not_kept() -> None:
    parameters, optimizer = an_optimizer()
    dropped = weakref.ref(optimizer)
    tensor = weakref.ref(parameters[0])

    del optimizer, parameters
    gc.collect()

    assert (dropped(), tensor()) == (None, None)
