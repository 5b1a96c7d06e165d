"""Random states for ranks that the old run did not have: derived from those of an old rank, and never the same.

Ranks that draw the same numbers (with a common seed, to decide alike) must continue to do so: a state that two old
ranks share is kept for the new rank. Begin with `Derived.states`.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import xxhash

from ttprun.rank.process import random_state
from ttprun.rank.values import pack

_TORCH_SEEDS, _NUMPY_SEEDS = (1 << 63) - 1, (1 << 32) - 1


class Derived:
    """The random states of one new rank.

    rank     the new rank
    common   the states that another old rank has too, packed, see `states_in`
    """

    def __init__(self, rank: int, common: set[bytes]) -> None:
        self._rank = rank
        self._common = common

    def states(self, recorded: random_state.RngState) -> random_state.RngState:
        """The global generators' states, derived from an old rank's."""
        return {name: self._state(name, state) for name, state in recorded.items()}

    def _state(self, name: str, state: Any) -> Any:
        if pack([name, state]) in self._common:
            return state
        seed = self._seed([name, state])
        if name == "python":
            return random_state.state_of_python(random.Random(seed))
        if name == "torch":
            return self._torch(seed)
        numpy: Any = sys.modules.get("numpy")
        return state if numpy is None else random_state.state_of_numpy(numpy.random.RandomState(seed & _NUMPY_SEEDS))

    def torch_state(self, state: bytes) -> bytes:
        """The state of a torch.Generator, derived from an old rank's."""
        found: bytes = self._state("torch", state)
        return found

    def reseed(self, generator: Any, recorded: list[Any]) -> None:
        """Reseed a generator that has an old rank's state, so that it draws other numbers.

        recorded   kind and state from the record
        """
        if pack(recorded) in self._common:
            return
        seed = self._seed(recorded)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed & _TORCH_SEEDS)
        elif isinstance(generator, random.Random):
            generator.seed(seed)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        elif hasattr(generator, "state"):
            generator.state = type(generator)(seed).state
        else:
            generator.seed(seed & _NUMPY_SEEDS)

    def _seed(self, recorded: list[Any]) -> int:
        return xxhash.xxh3_64_intdigest(pack([*recorded, self._rank]))

    @staticmethod
    def _torch(seed: int) -> bytes:
        generator = torch.Generator()
        generator.manual_seed(seed & _TORCH_SEEDS)
        return generator.get_state().numpy().tobytes()


def states_in(fields: dict[str, Any], generators: list[list[Any]]) -> set[bytes]:
    """Every random state in a boundary's record, packed.

    generators   kind and state of those in variables
    """
    loops = [*(loop for of_frame in fields["loops"] for loop in of_frame), *fields["generator_loops"]]
    states = [fields["rng"], *(loop[name] for loop in loops for name in ("began_with", "item_rng") if loop[name])]
    states += [iterator["rng"] for iterator in fields["loaders"]]
    found = {pack([name, state]) for one in states for name, state in one.items()}
    found |= {pack(["torch", state]) for iterator in fields["loaders"] for state in iterator["generators"]}
    return found | set(map(pack, generators))
