"""What FSDP2 gathers is not copied: it is made again of the shards, unless the script changes these before the step."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ttprun
from tests.rank.worlds import FakeAgent, run_world, say, wait_for
from ttprun import torch_versions
from ttprun.capture.records.recorder import Recorder
from ttprun.groups import gathers as gathers_of_groups
from ttprun.groups.gathers import GatheredInput, Shards
from ttprun.groups.inputs import TRUSTED_AFTER
from ttprun.groups.journal import Journal
from ttprun.groups.operations import Entry
from ttprun.introspect.current_rank import INPUT, current
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.protocol import from_rank

pytestmark = pytest.mark.skipif(
    torch_versions.release_of(torch.__version__) < (2, 7),
    reason="torch 2.6 itself cannot run fully_shard on the processor (CPU streams without record_event)",
)

CALLS = 152  # a collective, from its issue to its end
GATHERS = 3  # of two blocks and the rest in the forward pass, of which the last block's are kept


class Script:
    """A model of FSDP2 with its optimizer, in a rank."""

    def __init__(self, is_half: bool = False) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if is_half else MixedPrecisionPolicy()
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
        for block in self.model[:-1]:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def forward(self, step: int) -> Any:
        given = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + dist.get_rank()))
        return self.model(given).square().mean()

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.forward(step).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()

    @property
    def shards(self) -> list[Any]:
        return [one._local_tensor.tolist() for one in self.model.parameters() if isinstance(one, DTensor)]


def gathers() -> list[Entry]:
    """The all-gathers of the current step."""
    session = current()
    assert session is not None
    return [entry for entry in session[Journal].entries if entry.op in ("all_gather_single", "_allgather_base")]


def count_copies(rank: int, is_half: bool) -> list[tuple[int, int]]:
    """Of each step (all-gathers, bytes of their inputs that are copied)."""
    script, found = Script(is_half), []
    for step in range(TRUSTED_AFTER + 3):
        script.backward(step)
        entries = gathers()
        found.append((len(entries), sum(copy.nbytes for entry in entries for copy in entry.input.tensors)))
        script.optimizer.step()
    return found


@pytest.mark.parametrize("is_half", [False, True], ids=["float", "bfloat16"])
def test_inputs_of_all_gathers_are_not_copied_once_it_is_known_what_they_are_made_of(is_half: bool) -> None:
    (found, _) = run_world(count_copies, is_half)

    numbers, copied = zip(*found, strict=True)
    assert min(numbers) >= GATHERS
    assert all(copied[:TRUSTED_AFTER])
    assert copied[TRUSTED_AFTER:] == (0, 0, 0)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda weight: weight.mul_(2),
    "its data": lambda weight: weight.data.mul_(2),
    "many at once": lambda weight: torch._foreach_mul_([weight], 2.0),
    "its part": lambda weight: weight.to_local().mul_(2),
}


def change_before_the_step(rank: int, how: str) -> list[Any]:
    script = Script()
    for step in range(TRUSTED_AFTER + 1):
        script.step(step)
    script.backward(10)
    before = gathers()[0].input
    assert isinstance(before, GatheredInput)
    (same,) = before.made_again()
    with torch.no_grad():
        WRITES[how](script.model[-1].weight)  # which the root gathers first
    try:
        before.made_again()
        after = "made of the changed shards"
    except NotRepairableError as error:
        after = str(error)
    others = [sum(one.numel() for one in entry.input.made_again()) for entry in gathers()[1:2]]
    script.optimizer.step()
    copied = []
    for step in range(3):
        script.backward(20 + step)
        copied.append([len(entry.input.tensors) for entry in gathers()])
        script.optimizer.step()
    return [same.numel(), after, others, copied]


@pytest.mark.parametrize("how", WRITES)
def test_shards_that_the_script_changes_before_its_step_are_no_input_and_are_copied_from_then_on(how: str) -> None:
    (found, _) = run_world(change_before_the_step, how)

    elements, after, others, copied = found
    assert (elements, others) == (21, [21])  # half of a layer
    assert after == "a parameter was changed after it was gathered: what it was is therefore lost"
    assert all(len(of_step) >= GATHERS for of_step in copied)
    assert all(sum(of_step) in (1, 2) for of_step in copied)  # the changed layer is gathered once, or twice


def change_one_element_in_each_step(rank: int) -> list[int]:
    script, found = Script(), []
    for step in range(TRUSTED_AFTER + 2):
        script.backward(step)
        found.append(sum(len(entry.input.tensors) for entry in gathers()))
        with torch.no_grad():
            for block in script.model:
                block.weight.to_local()[1, 4] += 1
        script.optimizer.step()
    return found


def test_a_script_that_changes_a_single_element_before_each_step_is_seen_in_its_first_ones() -> None:
    (found, _) = run_world(change_one_element_in_each_step)

    assert len(set(found)) == 1
    assert found[-1] >= GATHERS


def train_long(rank: int) -> list[int]:
    """How many inputs each step copies."""
    gathers_of_groups._LOOKS_EVERY = 8
    script, found = Script(), []
    for step in range(24):
        script.backward(step)
        found.append(sum(len(entry.input.tensors) for entry in gathers()))
        script.optimizer.step()
    return found[TRUSTED_AFTER:]


def test_whole_looks_are_taken_in_turns() -> None:
    (found, _) = run_world(train_long)

    assert max(found) <= 2  # one layer, in the forward pass and in the backward pass
    assert 6 <= sum(map(bool, found)) <= 9  # three layers, each in every 8th step


def lose_the_connections(rank: int, is_to_break: bool) -> list[Any]:
    """Between two steps' forward and backward passes all connections break, and what was gathered is issued again."""
    script = Script()
    for step in range(TRUSTED_AFTER + 2):
        loss = script.forward(step)
        if is_to_break and step == TRUSTED_AFTER + 1:
            assert all(isinstance(entry.input, GatheredInput) for entry in gathers())
            say("forward")
            wait_for("broken")
        script.optimizer.zero_grad()
        loss.backward()
        script.optimizer.step()
    return script.shards


def break_in_the_step(agent: FakeAgent) -> None:
    for rank in range(2):
        agent.wait_for(rank, from_rank.Note, text="forward")
    agent.boundary = TRUSTED_AFTER + 1
    frozen = agent.break_connections()
    assert [one.boundary for one in frozen] == [agent.boundary] * 2
    agent.resume()
    for rank in range(2):
        agent.wait_for(rank, from_rank.RankReissued, generation=agent.generation)
        agent.send_value(rank, "broken")


def test_what_was_gathered_is_issued_again_from_the_shards_and_nothing_differs() -> None:
    undisturbed = run_world(lose_the_connections, False)

    found = run_world(lose_the_connections, True, scenario=break_in_the_step)

    assert found == undisturbed


def calls_of_ours(action: Callable[[], Any]) -> Counter[str]:
    """How many calls are made in ttprun, of Python's functions and of C's, by function."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and frame.f_globals.get("__name__", "").startswith("ttprun."):
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


def count_calls(rank: int) -> tuple[int, Counter[str], Counter[str]]:
    """(collectives, calls in the forward and backward pass, calls in the step) of a step long after the first ones."""
    script = Script()
    for step in range(16):
        script.step(step)
    passes = calls_of_ours(lambda: script.backward(20))
    session = current()
    assert session is not None
    return len(session[Journal].entries), passes, calls_of_ours(script.optimizer.step)


def test_a_collective_of_fsdp2_makes_few_calls_and_a_dtensor_is_no_sample_of_what_ranks_hold_alike() -> None:
    ((collectives, passes, step), _) = run_world(count_calls)

    assert passes.total() / collectives <= CALLS, passes.most_common(30)
    assert passes["fsdp_caller"] == 2 * collectives  # it and sys._getframe, however many frames are looked at
    assert passes["tensors_in"] <= 8 * collectives
    assert step["_some_bytes"] == 0, step


def note_inputs(rank: int) -> tuple[int, int, int]:
    """Over ten steps: all-gathers, reduce-scatters, inputs of these that are noted."""
    script, gathered, reduced, noted = Script(), 0, 0, 0
    session = current()
    assert session is not None
    for step in range(10):
        script.backward(step)
        gathered += len(gathers())
        reduced += len(session[Journal].entries) - len(gathers())
        noted += sum(kind == INPUT for kind, *_ in session[Recorder].evidence.left(session.applied))
        script.optimizer.step()
    return gathered, reduced, noted


def test_of_gathered_weights_few_inputs_are_noted_and_of_gradients_those_of_the_first_at_least() -> None:
    """All that follows depends on the weights: losses and gradients are compared."""
    ((gathered, reduced, noted), _) = run_world(note_inputs)

    assert (gathered, reduced) == (50, 30)
    assert reduced + 10 <= noted <= reduced + 25


def test_what_seven_billion_parameters_take_on_a_device_is_what_the_guide_says() -> None:
    """From shapes alone: of a layer of Llama the weights of attention, of the MLP, and two norms."""
    wide, ranks, layers = 4096, 8, 32
    layer = [(wide, wide)] * 4 + [(11008, wide)] * 2 + [(wide, 11008)] + [(wide,)] * 2
    rest = [(32000, wide), (wide,), (32000, wide)]
    groups = [layer] * layers + [rest]
    elements = [sum(math.prod(shape) for shape in group) for group in groups]
    shards = [[torch.empty(math.prod(shape) // ranks, device="meta") for shape in group] for group in groups]
    noted = sum(Shards(group, 0).note().nbytes for group in shards) * 2  # forward and backward pass
    made = Shards(shards[0], 0).joined(torch.bfloat16).nbytes
    page = (Path(ttprun.__file__).parent / "guide" / "limits.md").read_text(encoding="utf-8")

    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert f"{sum(elements) / 1e9:.2f}e9 parameters" in page
    assert [row for row in rows if "reduce-scatters" in row and f"{elements[0] * 4 / 1e9:.2f} GB" in row]
    assert [row for row in rows if "samples of the shards" in row and f"{noted / 1e3:.0f} KB" in row], noted
    assert [row for row in rows if "made again" in row and f"{made / 1e6:.1f} MB" in row], made
