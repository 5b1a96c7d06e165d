"""Modules in variables: buffers, modes, and what is left to the repair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from tests.capture.user_values import (
    Net,
    applied_twice,
)
from tests.capture.values.carrying import (
    Scope,
    are_alike,
    carry,
    is_refused,
    record,
)
from tests.rank.processes import run_alone
from ttprun import frameworks
from ttprun.capture import values
from ttprun.capture.values import CannotRestoreError, Restore, changes, modules
from ttprun.tensors import gradients, shares


def trained(steps: int) -> Net:
    torch.manual_seed(steps)
    net = Net()
    for _ in range(steps):
        net(torch.randn(4, 3))
        net.seen += 1
    return net


def parameters_of(net: torch.nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}


class Around(torch.nn.Module):
    """Holds a part that torch.jit has compiled."""

    def __init__(self, steps: int, compile_part: Callable[[torch.nn.Module], Any]) -> None:
        super().__init__()
        torch.manual_seed(steps)
        self.part = compile_part(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
        for _ in range(steps):
            self.part(torch.randn(4, 3))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "compile_part", [lambda net: torch.jit.trace(net, torch.ones(2, 3)), torch.jit.script], ids=["traced", "scripted"]
)
def test_a_compiled_part_of_a_module_comes_back_with_its_buffers_and_mode(compile_part: Callable[..., Any]) -> None:
    lost, live = Around(5, compile_part), Around(1, compile_part)
    lost.eval()

    doubts = carry({"model": lost}, {"model": live})

    assert not doubts
    assert not live.part.training
    assert all(torch.equal(a, b) for a, b in zip(live.state_dict().values(), lost.state_dict().values(), strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_compiled_part_of_a_module_is_among_the_tensors_of_its_checkpoint() -> None:
    model = Around(1, lambda net: torch.jit.trace(net, torch.ones(2, 3)))

    found = dict(shares.tensors_of(model))

    assert found.keys() == model.state_dict().keys()


def test_a_part_of_a_model_under_a_name_of_its_own_is_recorded_once() -> None:
    lost, live = trained(5), trained(1)
    recorded, blobs = record({"norm": lost.norm, "model": lost, "again": lost})

    Restore(blobs, is_comparing=True).module({"norm": live.norm, "model": live, "again": live}, recorded, "")

    assert len(blobs) == len(list(lost.buffers())) + len(list(lost.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(live.state_dict().values(), lost.state_dict().values(), strict=True))


def test_a_module_with_a_buffer_of_another_shape_is_refused_with_its_name() -> None:
    lost = Net(3)

    with pytest.raises(CannotRestoreError, match=r"model\.norm\.running_mean of shape \[3\] is not in the replacement"):
        carry({"model": lost}, {"model": Net(4)}, stepped=parameters_of(lost))


def test_what_a_script_keeps_on_a_module_of_its_own_comes_back_though_its_weight_is_parametrized() -> None:
    lost, live = (torch.nn.utils.parametrizations.weight_norm(Net().inner) for _ in range(2))
    nets = Net(), Net()
    for net in nets:
        net.weight = torch.nn.Parameter(torch.ones(2, 2))
        torch.nn.utils.parametrizations.weight_norm(net)
    nets[0].recent.append(8)

    assert carry({"layer": lost, "net": nets[0]}, {"layer": live, "net": nets[1]}) == []

    assert list(nets[1].recent) == [8]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.LSTM(2, 2, num_layers=2), lambda: torch.nn.AdaptiveLogSoftmaxWithLoss(16, 10, [2, 4]),
        lambda: prune.l1_unstructured(torch.nn.Linear(2, 2), "weight", 1),
        lambda: torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(2))}),
    ],
    ids=["recurrent", "adaptive", "pruned", "parameters"],
)  # fmt: skip
def test_what_layers_of_a_library_make_for_themselves_does_not_hinder_a_recovery(make: Callable[[], Any]) -> None:
    lost, live = make(), make()
    record({"layer": lost})

    assert carry({"layer": lost}, {"layer": live}) == []


def test_a_part_of_a_model_is_named_by_it_once_the_parts_own_name_is_gone() -> None:
    def made() -> Scope:
        encoder = torch.nn.BatchNorm1d(3)
        rates = torch.zeros(2)
        model = torch.nn.Sequential(encoder)
        model.register_buffer("rates", rates)
        return {"encoder": encoder, "rates": rates, "model": model}

    lost, here = made(), made()
    values.begin_boundary()
    record(lost)
    for scope in (lost, here):
        del scope["encoder"], scope["rates"]
    lost["model"](torch.randn(4, 3))
    lost["model"].rates.add_(1)

    values.begin_boundary()
    assert carry(lost, here) == []

    assert torch.equal(here["model"][0].running_mean, lost["model"][0].running_mean)
    assert here["model"].rates.tolist() == [1.0, 1.0]


def test_the_gradient_of_a_parameter_that_no_optimizer_has_cannot_be_used_unseen() -> None:
    lost, live = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for layer in (lost, live):
        layer(torch.ones(1, 2)).sum().backward()

    carry({"layer": lost}, {"layer": live})

    assert all(parameter.grad is not None and parameter.grad.isnan().all() for parameter in live.parameters())


def _steps_of_a_hook(lost_steps: int) -> tuple[list[str], int, bool]:
    """What a replacement gets of a communication hook's state, which nothing else holds."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    models = []
    for steps in (lost_steps, 0):
        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for _ in range(steps):
            model(torch.ones(2, 64)).sum().backward()
        models.append(model)
    lost, here = (model._comm_hooks[0][1] for model in models)

    mismatches = carry({"model": models[0]}, {"model": models[1]})

    is_alike = all(torch.equal(here.error_dict[key], error) for key, error in lost.error_dict.items())
    return mismatches, here.iter, is_alike and len(here.error_dict) == len(lost.error_dict) == 1


def test_what_a_communication_hook_carries_from_step_to_step_comes_back() -> None:
    assert run_alone(_steps_of_a_hook, 4) == ([], 4, True)


HOOKS: dict[str, Callable[[torch.nn.Linear], Any]] = {
    "forward": lambda layer: layer.register_forward_hook(lambda *_: None),
    "before forward": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    "backward": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "gradient": lambda layer: layer.weight.register_hook(lambda gradient: gradient),
    "behind the gradient": lambda layer: layer.weight.register_post_accumulate_grad_hook(lambda parameter: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_a_step_has_put_on_and_the_replay_has_not_is_refused(kind: str) -> None:
    lost, live = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert not is_refused({"model": lost}, {"model": live})

    HOOKS[kind](lost)

    assert is_refused({"model": lost}, {"model": live})
    HOOKS[kind](live)
    assert not is_refused({"model": lost}, {"model": live})


def test_hooks_that_a_framework_puts_on_when_it_needs_them_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "HOOKS_WHEN_NEEDED", frozenset({f"{__name__}:<lambda>.<locals>.<lambda>"}))
    lost, live = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    HOOKS["forward"](lost)

    assert not is_refused({"model": lost}, {"model": live})


def test_hooks_of_which_a_second_one_changes_nothing_may_be_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "HOOKS_THAT_REPEAT", frozenset({f"{__name__}:<lambda>.<locals>.<lambda>"}))
    lost, live = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for layer in (lost, lost, live):
        HOOKS["forward"](layer)

    assert not is_refused({"model": lost}, {"model": live})
    assert is_refused({"model": lost}, {"model": torch.nn.Linear(2, 2)})


def test_what_a_replay_has_put_on_a_lost_replacement_is_no_hook_of_the_script() -> None:
    lost, live = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    lost(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(lost.parameters())

    gradients.poison([optimizer])  # FSDP's shards take part in no backward pass that would remove its hook

    assert not is_refused({"model": lost}, {"model": live})
    lost.weight.register_hook(lambda gradient: gradient)
    assert is_refused({"model": lost}, {"model": live})


def test_what_says_that_such_hooks_are_there_stays_as_the_replay_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "LEFT_OUT", {f"{__name__}:Hooked": "is_hooked"})
    lost, live = Hooked(), Hooked()
    vars(lost).update(is_hooked=True, counts=True)

    assert carry({"model": lost}, {"model": live}) == []

    assert vars(live)["counts"] is True
    assert "is_hooked" not in vars(live)


class Hooked(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


def _make_layered() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5), trained(1))


def _replace_buffer(model: Any) -> None:
    model[1]._buffers["running_mean"] = torch.ones(2)


def _add_buffer(model: Any) -> None:
    model[0]._buffers["more"] = torch.ones(2)


def _replace_part(model: Any) -> None:
    model._modules["2"] = torch.nn.ReLU()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a mode": lambda model: model[2].eval(),
    "a rate": lambda model: setattr(model[2], "p", 0.1),
    "an attribute of the script's": lambda model: setattr(model[3], "calls", 70),
    "an attribute that is new": lambda model: setattr(model[3], "fresh", 1),
    "an attribute that is gone": lambda model: delattr(model[3], "calls"),
    "a parameter that is frozen": lambda model: model[0].weight.requires_grad_(False),
    "a buffer put in place by hand": _replace_buffer,
    "a buffer added by hand": _add_buffer,
    "a buffer's numbers": lambda model: model[1].running_mean.add_(1.0),
    "a part put in place by hand": _replace_part,
    "a part that is taken away": lambda model: delattr(model, "2"),
    "a part that is another one": lambda model: setattr(model, "2", torch.nn.ReLU()),
    **{f"a hook, {kind}": lambda model, kind=kind: HOOKS[kind](model[0]) for kind in HOOKS},  # type: ignore[misc]
}


@pytest.mark.parametrize("has_versions", [False, True])
@pytest.mark.parametrize("has_hooks", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_of_a_module_from_boundary_to_boundary_is_recorded(
    change: str, has_hooks: bool, has_versions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "ARE_COUNTED", changes.ARE_COUNTED and has_versions)
    model = _make_layered()
    if has_hooks:
        HOOKS["gradient"](model[3].inner)
    for _ in range(3):
        values.begin_boundary()
        before = record({"model": model})

    CHANGES[change](model)
    values.begin_boundary()
    behind = record({"model": model})

    assert not are_alike(before, behind)
    values.begin_boundary()
    assert are_alike(record({"model": model}), behind)


class Logged(torch.nn.Module):
    """As Lightning keeps what is logged under one name."""

    def __init__(self, is_tensor: bool) -> None:
        super().__init__()
        self.is_tensor = is_tensor
        self.value = torch.zeros(()) if is_tensor else None
        self.kept_for: dict[int, str] = {}


def test_a_module_that_a_framework_makes_at_the_end_of_an_epoch_is_made_and_given_what_it_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = {f"{__name__}:Logged": lambda kind, attributes: kind(attributes["is_tensor"])}
    monkeypatch.setattr(frameworks, "MADE", make)
    lost, here = Logged(is_tensor=True), dict[str, Any]()
    lost.value = torch.tensor(3.0)

    carry({"logged": {"loss": lost}}, here)

    assert here["logged"]["loss"].value == 3.0


def test_what_a_framework_knows_of_a_module_by_the_ids_of_its_parts_is_left_to_the_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OfUser(Logged):
        pass

    monkeypatch.setitem(frameworks.LEFT_OUT, f"{__name__}:Logged", "kept_for")
    lost, live = OfUser(is_tensor=False), OfUser(is_tensor=False)
    lost.kept_for, live.kept_for = {1: "of the lost rank"}, {2: "of this process"}

    carry({"model": lost}, {"model": live})

    assert live.kept_for == {2: "of this process"}


def test_a_function_in_a_module_that_holds_the_module_is_walked_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(modules._Layout):
        def __init__(self, *args: Any) -> None:
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr(modules, "_Layout", Counted)
    model = torch.nn.Linear(2, 2)
    model.twice = applied_twice(model)

    record({"model": model})

    assert len(made) == 1
