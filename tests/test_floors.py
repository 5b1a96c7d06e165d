"""Modules import from floors below, never from beside or above, not even inside a function."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.budget import module_of, tree_of, used_names

PACKAGE = Path(__file__).resolve().parent.parent / "ttprun"
_BASE = {"errors", "text_hashes", "torch_versions"}
# What each part may import of ttprun, beside its own modules. The libraries of a rank are capture, groups and tensors:
# none imports another one, nor what uses them. The walls: shared names in `test_no_wall_has_too_many_doors`.
FLOORS = {
    "frameworks": set(),
    "recovery": {"protocol"},
    "device": set(),
    "observe": {"errors"},
    "protocol": set(),
    "state": {"__version__", "errors"},
    "introspect": {"device", "frameworks", "protocol"},
    "capture": {"introspect", "device", "frameworks", "protocol"} | _BASE,
    "groups": {"introspect", "device", "protocol"} | _BASE,
    "tensors": {"introspect", "device", "protocol", "state"} | _BASE,
    "rank": {"capture", "groups", "tensors", "introspect", "chaos", "device", "elastic_resume", "frameworks", "mindio"}
    | {"protocol", "state"}
    | _BASE,
    "elastic_resume": {"agent", "capture", "errors", "groups", "introspect", "protocol", "rank", "state"},
    "chaos": {"agent", "capture", "config", "config_sources", "device", "errors", "groups", "introspect", "observe"}
    | {"protocol", "rank", "tensors", "text_hashes"},
    "shim": {"rank"},
    "mindio": {"agent", "capture", "device", "errors", "groups", "introspect", "protocol", "rank"}
    | {"recovery", "tensors"},
    "agent": {"capture", "chaos", "config", "device", "elastic_resume", "errors", "groups", "introspect", "mindio"}
    | {"observe", "protocol", "rank", "recovery", "tensors"}
    | {"__version__", "early_signals", "state", "text_hashes", "torch_versions"},
    "web": {"__version__", "errors", "observe"},
    "cli": {"agent", "capture", "chaos", "config", "config_sources", "device", "errors", "introspect", "mindio"}
    | {"observe", "protocol", "rank", "__version__", "early_signals", "frameworks", "state"}
    | {"torch_versions", "web"},
}
# What runs inside a rank, room by room: each imports only from those before it, for annotations too.
ROOMS = [
    ("introspect",),
    ("capture", "groups", "tensors"),
    ("rank.heartbeat", "rank.held_signals"),
    ("rank.proof", "rank.verification"),
    ("rank.step",),
    ("rank.replay",),
    ("elastic_resume",),
    ("mindio",),
    ("chaos",),
    ("rank.bootstrap",),
]
_FOLDERS = ("introspect", "capture", "groups", "tensors", "rank", "elastic_resume", "mindio", "chaos")
CAN_ACT = {"os", "time", "socket", "subprocess", "threading", "logging", "random", "torch", "asyncio", "sys"}


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, wherever in it."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("part", FLOORS)
def test_a_part_imports_only_from_the_floors_below(part: str) -> None:
    ours = {
        (path.name, name.split(".")[1])
        for path in (PACKAGE / part).rglob("*.py")
        for name in imported(path)
        if name.startswith("ttprun.")
    }

    assert {(path, name) for path, name in ours if name not in FLOORS[part] | {part}} == set()


def room_of(name: str) -> int | None:
    """The number of the room in which a module lies, by its dotted name below ttprun; None if in none."""
    for number, names in enumerate(ROOMS):
        if any(f"{name}.".startswith(f"{room}.") for room in names):
            return number
    return None


def test_a_room_of_the_rank_imports_only_from_those_before_it() -> None:
    arrows_up = set()
    for folder in _FOLDERS:
        for path in (PACKAGE / folder).rglob("*.py"):
            own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            room = room_of(own)
            assert room is not None or own == "rank.__init__", f"{own} is in no room"
            for name in imported(path):
                other = room_of(name.removeprefix("ttprun."))
                if room is not None and other is not None and other > room and name.startswith("ttprun."):
                    arrows_up.add((own, name))

    assert arrows_up == set()


def needs_of(*folders: str) -> dict[str, set[str]]:
    """Module -> those of these folders that it imports, for annotations alone or not, wherever in it."""
    paths = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in folders
        for path in (PACKAGE / folder).rglob("*.py")
    }
    return {
        own: {name if name in paths else name.rpartition(".")[0] for name in imported(path)} & paths.keys()
        for own, path in paths.items()
    }


def test_no_modules_of_the_agent_or_of_a_rank_import_each_other_in_a_circle() -> None:
    TopologicalSorter(needs_of("agent", *_FOLDERS)).prepare()  # raises CycleError


def test_what_a_rank_knows_of_itself_imports_none_of_the_folders_that_it_serves() -> None:
    assert needs_of(*_FOLDERS)["ttprun.introspect.current_rank"] == {"ttprun.introspect.costs"}


# What a rank's session is called where it is written, and the file of its class.
_SESSIONS = {"session", "member", "_session", "_member", "found"}
_OWN = {"introspect/current_rank.py"}


def test_what_a_session_knows_is_written_in_one_file() -> None:
    writers: defaultdict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner in _SESSIONS or (owner == "self" and file in _OWN):
                writers[node.attr].add("its own" if file in _OWN else file)

    assert writers["applied"] == writers["mode"] == {"its own"}
    assert {field: files for field, files in writers.items() if len(files) > 1} == {}


def test_the_parts_of_the_agent_know_only_those_that_they_are_built_on() -> None:
    needs = needs_of("agent", "chaos", "elastic_resume")

    assert {own for own in needs if "ttprun.agent.launcher.supervisor" in needs[own]} == {
        "ttprun.agent.launcher.elastic_agent",
        "ttprun.agent.launcher.launch",
    }


# A node and what is decided know each other by messages alone, also in one agent; both stand on the ground.
APART = {
    "base": ("base",),
    "node": ("base", "node"),
    "lead": ("base", "lead"),
    "between": ("base", "node", "lead", "between"),
}


def test_a_node_and_what_is_decided_import_nothing_of_each_other() -> None:
    needs = needs_of("agent", "recovery")
    folders = {name: name.removeprefix("ttprun.").removeprefix("agent.").partition(".")[0] for name in needs}
    arrows = {
        (own, name)
        for own, others in needs.items()
        for name in others
        if folders[own] in APART and folders[name] not in (*APART[folders[own]], "recovery")
    }
    decided = {own for own in needs if folders[own] in ("base", "node") and any("recovery" in n for n in needs[own])}

    assert arrows == decided == set()


def test_the_recovery_imports_nothing_that_can_act() -> None:
    roots = {name.split(".")[0] for path in (PACKAGE / "recovery").glob("*.py") for name in imported(path)}

    assert roots & CAN_ACT == set()


def test_the_shim_imports_only_the_standard_library_before_it_hands_over() -> None:
    tree = tree_of(PACKAGE / "shim" / "sitecustomize.py")
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}

    assert names == {"os", "sys"}


def test_the_observer_that_torchruns_ranks_load_imports_nothing_of_ours() -> None:
    names = set(imported(PACKAGE / "chaos" / "plain_observer" / "sitecustomize.py"))

    assert {name for name in names if name.startswith("ttprun")} == set()


# Walls with more doors than MOST_DOORS, and how many they have today: none of these figures may rise. What would close
# them is that the machine takes what ranks have said as it is, and that each library shows one object.
MOST_DOORS = 40
WIDE = {
    ("agent", "protocol"): 159,
    ("agent", "recovery"): 72,
    ("rank", "protocol"): 79,
    ("capture", "introspect"): 92,
    ("rank", "introspect"): 61,  # nine of them are what it knows of itself, which was its own before
    ("rank", "tensors"): 57,
    ("mindio", "protocol"): 49,  # half of them are the messages of its own callbacks
}


def test_a_file_is_known_by_its_name_alone() -> None:
    """But for those that each part, or each kind of process, has by the same name."""
    shared = {"__init__.py", "sitecustomize.py"}
    named = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name not in shared)

    assert [name for name, count in named.items() if count > 1] == []


MOST_LINES = 500


def test_no_module_is_too_long_to_be_one_thought() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}

    assert {path.name: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_no_wall_has_too_many_doors() -> None:
    modules = {module_of(PACKAGE, path) for path in PACKAGE.rglob("*.py")}
    names: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        own = module_of(PACKAGE, path).partition(".")[0]
        for name in used_names(tree_of(path), modules):
            other = name.partition(".")[0]
            if other != own and own in FLOORS:
                names[own, other].add(name)

    doors = {wall: len(found) for wall, found in names.items()}
    assert {wall: count for wall, count in doors.items() if count > WIDE.get(wall, MOST_DOORS)} == {}
    assert {wall for wall in WIDE if doors[wall] <= MOST_DOORS} == set(), "these are wide no more"
