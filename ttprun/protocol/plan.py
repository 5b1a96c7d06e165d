"""What a standby is to import beforehand: the plan is sent in a memory file, see `to_rank.Preload`."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Plan:
    """What is to be imported.

    modules    name, file ("": not to be imported) and changes of the environment before it, in the leader's order
    own        variables that differ between ranks
    given      those of them that no rank's script has changed
    arguments  of the script: sys.argv meanwhile
    left_out   modules that an earlier round has refused
    """

    modules: tuple[tuple[str, str, dict[str, str | None]], ...]
    own: tuple[str, ...]
    arguments: list[str]
    given: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many modules are to be imported."""
        return sum(bool(file) for _, file, _ in self.modules)

    def without(self, refused: dict[str, str]) -> Plan:
        """The same without some modules, and without what lies inside of them."""

        def is_refused(name: str) -> bool:
            parts = name.split(".")
            return any(".".join(parts[:length]) in refused for length in range(1, len(parts) + 1))

        left = tuple((name, "" if is_refused(name) else file, changes) for name, file, changes in self.modules)
        return replace(self, modules=left, left_out=tuple(sorted(refused)))
