"""Whether the weights of the newest boundary are known, however a script changes them in the meantime."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ttprun.introspect.tensor_bytes import bytes_of
from ttprun.tensors.replicated import FULL_LOOKS, PostStepWeights

Change = Callable[[torch.Tensor], object]
CHANGES: dict[str, Change] = {
    "in place": lambda weight: weight.detach().mul_(0.5),
    "by .data": lambda weight: weight.data.mul_(0.5),
    "loaded again": lambda weight: weight.data.copy_(torch.zeros(4)),
}


class Weights:
    """What is trained at one moment."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights = list(weights)

    def sample(self, boundary: int) -> bytes:
        return bytes_of(self.weights[boundary % len(self.weights)].detach()).tobytes()

    def sample_later(self, boundary: int) -> bytes:
        return self.sample(boundary)


class Training:
    """Two weights, steps that change them, and what is known of them behind each."""

    def __init__(self) -> None:
        self.weights = [torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)]
        self.reported: list[str] = []
        self.kept = PostStepWeights(self.now, self.reported.append)
        self.boundary = 0
        self.left = [weight.detach().clone() for weight in self.weights]  # by the newest step

    def now(self) -> Weights:
        return Weights(self.weights)

    def look(self) -> None:
        """As the hook before a step does it."""
        now = self.now()
        self.kept.compare(now, now.sample(self.boundary + 1))

    def step(self) -> None:
        """As the hooks of the optimizer do it."""
        self.look()
        for weight in self.weights:
            weight.detach().sub_(0.1)
        self.boundary += 1
        self.left = [weight.detach().clone() for weight in self.weights]
        self.kept.note(self.boundary)

    def is_known(self) -> bool:
        """Whether what `of` gives is what the newest step had left; False if that is refused."""
        if self.kept.why_not():
            return False
        pairs = zip(self.weights, self.left, strict=True)
        assert all(torch.equal(self.kept.of(weight), left) for weight, left in pairs)
        return True


@pytest.fixture
def training() -> Training:
    return Training()


def test_weights_that_only_steps_change_are_known_and_never_copied(training: Training) -> None:
    for _ in range(5):
        training.step()
        assert training.is_known()
        assert all(training.kept.of(weight) is weight for weight in training.weights)

    assert training.reported == []


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps_before", [1, FULL_LOOKS])
def test_a_change_behind_one_of_the_first_steps_is_refused_at_once_and_kept_out_from_the_next_step_on(
    training: Training, change: str, steps_before: int
) -> None:
    for _ in range(steps_before):
        training.step()

    CHANGES[change](training.weights[1])

    assert not training.is_known()
    training.step()
    assert training.is_known()
    CHANGES[change](training.weights[0])
    assert training.is_known()
    assert len(training.reported) == 1


def test_a_change_that_version_counters_show_is_refused_at_any_step(training: Training) -> None:
    for _ in range(FULL_LOOKS + 3):
        training.step()

    CHANGES["in place"](training.weights[1])

    assert not training.is_known()


def test_a_change_that_only_the_sample_shows_is_found_within_as_many_steps_as_there_are_weights(
    training: Training,
) -> None:
    for _ in range(FULL_LOOKS + 1):
        training.step()

    for _ in training.weights:
        CHANGES["by .data"](training.weights[0])
        training.step()

    CHANGES["by .data"](training.weights[0])
    assert training.is_known()
    assert len(training.reported) == 1


@pytest.mark.parametrize("steps_before", [1, FULL_LOOKS + 2])
def test_parameters_that_are_added_between_two_steps_change_no_weights(training: Training, steps_before: int) -> None:
    """As `add_param_group` does it, in a fine-tuning that thaws one layer after the other."""
    for _ in range(steps_before):
        training.step()

    training.weights.append(torch.zeros(4, requires_grad=True))
    training.step()

    assert training.is_known()
    assert training.reported == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found_though_parameters_are_added_too(training: Training, change: str) -> None:
    training.step()

    CHANGES[change](training.weights[0])
    training.weights.append(torch.zeros(4, requires_grad=True))

    assert not training.is_known()
    training.step()
    assert len(training.reported) == 1


def test_until_the_first_step_behind_a_discovery_nothing_is_known(training: Training) -> None:
    training.step()
    CHANGES["in place"](training.weights[0])
    training.look()

    assert training.kept.is_kept
    assert not training.is_known()


def test_a_replacement_keeps_copies_from_its_first_boundary_on_if_the_lost_rank_did(training: Training) -> None:
    training.kept.is_kept = True

    training.kept.note(7)
    CHANGES["by .data"](training.weights[0])

    assert training.is_known()
