"""Messages of standbys, and for them; what ranks report for their sake; and the plan of what one imports beforehand."""

from __future__ import annotations

from msgspec import field
from msgspec.structs import replace

from ttprun.protocol.codec import Message

# What ranks and standbys report.


class WarmUp(Message, frozen=True):
    """Import these modules of torch, and compile these files of the user; a standby's answer is `Ready`.

    A node's first rank reports it after its first step; standbys are sent it, and who waits for slots, for its own.

    modules  names, in the order of their imports
    """

    modules: list[str]
    files: list[str]


class Imported(Message, frozen=True):
    """The other modules that a rank has imported by its first step.

    modules    (name, file, changes of the environment before its import) each; the file is "" for what a standby must
               not import; None deletes a variable
    directory  in which the script runs
    device     index of the device that it uses; None: none
    """

    modules: list[tuple[str, str, dict[str, str | None]]]
    directory: str
    device: int | None = None


class Ready(Message, frozen=True):
    """A standby has imported its modules, or made its context.

    is_copyable  it can be forked: one thread, no device in use
    refused      modules that it should not have imported, and why
    """

    is_copyable: bool
    refused: dict[str, str] = field(default_factory=dict)


class Copied(Message, frozen=True):
    """A standby has forked a copy, with this pid."""

    pid: int


# What standbys are sent.


class Preload(Message, frozen=True):
    """Import the plan in the first attached descriptor, and note in the second what runs; then `Ready`.

    follow   names of modules whose loops are followed
    loops    files of such modules
    """

    follow: list[str] = field(default_factory=list)
    loops: list[str] | None = None


class Copy(Message, frozen=True):
    """Fork a copy that listens on the attached descriptor; the answer is `Copied`.

    device   index of the one on which the copy makes a context, and then says `Ready`; None: it does not
    """

    device: int | None = None


Report = WarmUp | Imported | Ready | Copied
Order = WarmUp | Preload | Copy


class PreloadPlan(Message, frozen=True):
    """What a standby is to import beforehand: it is sent in a memory file, see `Preload`.

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

    def without(self, refused: dict[str, str]) -> PreloadPlan:
        """The plan without some modules, and without what lies inside them."""

        def is_refused(name: str) -> bool:
            parts = name.split(".")
            return any(".".join(parts[:length]) in refused for length in range(1, len(parts) + 1))

        modules = tuple((name, "" if is_refused(name) else file, changes) for name, file, changes in self.modules)
        return replace(self, modules=modules, left_out=tuple(sorted(refused)))
