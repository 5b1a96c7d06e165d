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
from msgspec.structs import replace

from ttprun.capture.records.boundary_record import BoundaryRecord, LoopRecord
from ttprun.capture.records.packing import pack
from ttprun.introspect import random_state

_TORCH_SEEDS, _NUMPY_SEEDS = (1 << 63) - 1, (1 << 32) - 1


class Derived:
    """The random states of one new rank.

    of       the new rank, or what it shares with new ranks that must draw the same
    common   the states that another old rank has too, packed, see `states_in`
    """

    def __init__(self, of: int | bytes, common: set[bytes]) -> None:
        self._of = of
        self._common = common

    def states(self, recorded: random_state.RngState) -> random_state.RngState:
        """The global generators' states, derived from an old rank's."""
        return {name: self._state(name, state) for name, state in recorded.items()}

    def record(self, last: BoundaryRecord) -> BoundaryRecord:
        """An old rank's record with derived states, and without its files."""
        loaders = [
            iterator
            | {
                "rng": self.states(iterator["rng"]),
                "generators": list(map(self.torch_state, iterator["generators"])),
            }
            for iterator in last.loaders
        ]
        return replace(
            last,
            rng=self.states(last.rng),
            loops=[list(map(self._loop, of_frame)) for of_frame in last.loops],
            generator_loops=list(map(self._loop, last.generator_loops)),
            loaders=loaders,
            files=[],
        )

    def _loop(self, loop: LoopRecord) -> LoopRecord:
        began_with, item_rng = (state and self.states(state) for state in (loop.began_with, loop.item_rng))
        return replace(loop, began_with=began_with, item_rng=item_rng)

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
        derived: bytes = self._state("torch", state)
        return derived

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
        return xxhash.xxh3_64_intdigest(pack([*recorded, self._of]))

    @staticmethod
    def _torch(seed: int) -> bytes:
        generator = torch.Generator()
        generator.manual_seed(seed & _TORCH_SEEDS)
        return generator.get_state().numpy().tobytes()


def states_in(fields: BoundaryRecord, generators: list[list[Any]]) -> set[bytes]:
    """Every random state in a boundary's record, packed.

    generators   kind and state of those in variables
    """
    states = [fields.rng, *(state for loop in fields.active() for state in (loop.began_with, loop.item_rng) if state)]
    states += [iterator["rng"] for iterator in fields.loaders]
    packed = {pack([name, state]) for by_name in states for name, state in by_name.items()}
    packed |= {pack(["torch", state]) for iterator in fields.loaders for state in iterator["generators"]}
    return packed | set(map(pack, generators))
