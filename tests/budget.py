"""What the tree may grow to (`budget.yaml`), and what it has: `python -m tests.budget` prints the table.

    python -m tests.budget             the sums, what each package has, and where it is over its budget
    python -m tests.budget --lower     write lower figures down where the tree has become smaller

The sums of the whole tree only fall: they are compared with all that git has of budget.yaml. A package may borrow from
the others until a day. It is a folder of ttprun, or of `rank` or `agent`. Lines of the product are not counted: that
would reward dense code. Begin with `sums`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TREE = Path(__file__).resolve().parent.parent / "ttprun"
BUDGET = Path(__file__).with_name("budget.yaml")
# What a capability may add to the sums, once it is begun: `grants: [devices]` in budget.yaml. A statement brings about
# as many lines of tests as the tree has for one.
GRANTS = {
    "devices": {"statements": 1_200, "lines of tests": 1_800},
    "steps": {"statements": 600, "lines of tests": 900},
}
_LOAN = ("what", "by", "why", "mechanism", "until")
DIVIDED = ("rank", "agent")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
# Words that fit any variable, and so name none: what does it hold?
_PLACEHOLDERS = {"found", "one", "known", "held", "left"}

Figures = dict[str, int]  # "rank.step statements", "rank.step -> protocol" -> how many


@cache
def tree_of(path: Path) -> ast.Module:
    """A module's syntax tree, read once for all tests of the structure."""
    return ast.parse(path.read_text(encoding="utf-8"))


def sums(tree: Path = TREE) -> Figures:
    """The size of the house: statements with signatures, but no docstrings; modules; lines of tests."""
    modules = [tree_of(path) for path in tree.rglob("*.py")]
    tests = (path.read_text(encoding="utf-8") for path in (tree.parent / "tests").rglob("*.py"))
    nodes = (node for module in modules for node in ast.walk(module))
    return {
        "statements": sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes),
        "modules": len(modules),
        "lines of tests": sum(len(text.splitlines()) for text in tests),
    }


def allowed_sums(written: dict[str, Any]) -> Figures:
    """What a version of budget.yaml allows all of the tree.

    Raises KeyError for a grant that GRANTS does not have.
    """
    total = Counter(written["sums"])
    for name in written.get("grants") or ():
        total.update(GRANTS[name])
    return dict(total)


def earlier_versions() -> Iterator[dict[str, Any]]:
    """budget.yaml as git has it, the newest first, from the first version on that has sums; nothing without git."""
    name = BUDGET.relative_to(TREE.parent).as_posix()
    for commit in _git("log", "--format=%H", "--max-count=50", "--", name).split():
        version = yaml.safe_load(_git("show", f"{commit}:{name}"))
        if "sums" not in version:
            return
        yield version


def _git(*words: str) -> str:
    command = ["git", "-C", str(TREE.parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


def figures(tree: Path = TREE) -> Figures:
    """What a tree has: statements, signatures, public names and placeholders of each package, names across each wall.

    statements     without imports, docstrings and definitions
    signatures     of functions, methods and classes
    names          public ones at the top of a module
    placeholders   times that a variable or parameter is given one of the words of _PLACEHOLDERS as its name
    A -> B         different names of B that A uses, by import or as an attribute of an imported module
    """
    counts: Counter[str] = Counter()
    crossing: defaultdict[str, set[str]] = defaultdict(set)
    modules = {module_of(tree, path) for path in tree.rglob("*.py")}
    for path in tree.rglob("*.py"):
        parsed = tree_of(path)
        own = package_of(module_of(tree, path))
        for node in ast.walk(parsed):
            counts[f"{own} signatures"] += isinstance(node, _DEFINITIONS)
            is_plain = isinstance(node, ast.stmt) and not isinstance(node, (*_DEFINITIONS, *_IMPORTS))
            counts[f"{own} statements"] += is_plain and not _is_text(node)
        counts[f"{own} names"] += sum(not name.startswith("_") for name in _names_at_the_top(parsed))
        if placeholders := _count_placeholders(parsed):
            counts[f"{own} placeholders"] += placeholders
        for name in used_names(parsed, modules):
            other = package_of(name)
            if other != own:
                crossing[f"{own} -> {other}"].add(name)
    return dict(sorted({**counts, **{wall: len(names) for wall, names in crossing.items()}}.items()))


def module_of(tree: Path, path: Path) -> str:
    """The dotted name below ttprun: "groups.journal"; "" for ttprun itself."""
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(name: str) -> str:
    """The package of a module, or of a name in one; "ttprun" for what lies in no folder."""
    first, *rest = name.split(".")
    if first in DIVIDED and rest and (TREE / first / rest[0]).is_dir():
        return f"{first}.{rest[0]}"
    return first if (TREE / first).is_dir() and first else "ttprun"


def allowed(today: date | None = None) -> Figures:
    """The budget of the packages: what was written down, and the loans that are not due.

    Raises ValueError for a loan that lacks a field, or is one for the reason of another.
    """
    written = yaml.safe_load(BUDGET.read_text(encoding="utf-8"))
    total = Counter(written["figures"])
    for loan in written["loans"] or ():
        if lacking := [field for field in _LOAN if not str(loan.get(field) or "").strip()]:
            raise ValueError(f"the loan of '{loan.get('what')}' in {BUDGET.name} names no {lacking[0]}")
        if "same" in loan["why"].lower().split()[:2] or "see above" in loan["why"].lower():
            raise ValueError(f"the loan of '{loan['what']}' in {BUDGET.name} needs a reason of its own")
        if loan["until"] >= (today or date.today()):
            total[loan["what"]] += loan["by"]
    return dict(total)


def overdrawn(has: Figures, may: Figures) -> list[str]:
    """A sentence for each figure over its budget."""
    return [f"{what}: {count}, budget {may.get(what, 0)}" for what, count in has.items() if count > may.get(what, 0)]


def lower() -> None:
    """Write down what the tree has where that is less than the budget; loans that are paid back go."""
    written = yaml.safe_load(BUDGET.read_text(encoding="utf-8"))
    now, has = sums(), figures()
    base, loans = written["figures"], written["loans"] or ()
    kept = [loan for loan in loans if has.get(loan["what"], 0) > base.get(loan["what"], 0)]
    new = {
        "sums": {name: min(count, now[name]) for name, count in written["sums"].items()},
        "grants": written["grants"],
        "figures": {what: min(count, has[what]) for what, count in base.items() if what in has},
        "loans": kept,
    }
    lines = BUDGET.read_text(encoding="utf-8").splitlines(keepends=True)
    head = "".join(line for line in lines if line.startswith("#"))
    BUDGET.write_text(head + yaml.safe_dump(new, sort_keys=False, width=160), encoding="utf-8")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _count_placeholders(parsed: ast.Module) -> int:
    """Fields of a class are left out: they may be keys of a file or a message."""
    classes = (node for node in ast.walk(parsed) if isinstance(node, ast.ClassDef))
    fields = {id(row.target) for node in classes for row in node.body if isinstance(row, ast.AnnAssign)}
    return sum(_bound_name(node) in _PLACEHOLDERS for node in ast.walk(parsed) if id(node) not in fields)


def _bound_name(node: ast.AST) -> str | None:
    """The name that a variable or parameter gets here; None if none does."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=name):
            return name
    return None


def _names_at_the_top(parsed: ast.Module) -> Iterator[str]:
    for node in parsed.body:
        if isinstance(node, _DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def used_names(parsed: ast.Module, modules: set[str]) -> Iterator[str]:
    """Dotted names below ttprun that a module uses; of an imported module each attribute."""
    aliases: dict[str, str] = {}
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ttprun":
            below = (node.module or "").removeprefix("ttprun").removeprefix(".")
            for alias in node.names:
                name = f"{below}.{alias.name}".removeprefix(".")
                if name in modules:
                    aliases[alias.asname or alias.name] = name
                else:
                    yield name
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield f"{aliases[node.value.id]}.{node.attr}"


def _print_table() -> int:
    has, may = figures(), allowed()
    total, limit = sums(), allowed_sums(yaml.safe_load(BUDGET.read_text(encoding="utf-8")))
    for what, count in {**total, **has}.items():
        most = {**limit, **may}.get(what, 0)
        print(f"{what:48} {count:6} {most:6}{'  OVER' if count > most else ''}")
    return 1 if overdrawn(has, may) or overdrawn(total, limit) else 0


if __name__ == "__main__":
    if "--lower" in sys.argv[1:]:
        lower()
    sys.exit(_print_table())
