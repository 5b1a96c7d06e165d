"""What the tree may grow to (`budget.yaml`), and what it has: `python -m tests.budget` prints the table.

    python -m tests.budget             what each package has, and where it is over its budget
    python -m tests.budget --lower     write lower figures down where the tree has become smaller

A package is a folder of ttprun, or a folder of `rank` or `agent`. Lines are not counted: that would reward dense code.
Begin with `figures`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import yaml

TREE = Path(__file__).resolve().parent.parent / "ttprun"
BUDGET = Path(__file__).with_name("budget.yaml")
DIVIDED = ("rank", "agent")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
# Words that fit any variable, and so name none: what does it hold?
_PLACEHOLDERS = {"found", "one", "known", "held", "left"}

Figures = dict[str, int]  # "rank.step statements", "rank.step -> protocol" -> how many


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
        parsed = ast.parse(path.read_text(encoding="utf-8"))
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


def allowed() -> Figures:
    """The budget: what was written down, and each rise since, which names its reason."""
    written = yaml.safe_load(BUDGET.read_text(encoding="utf-8"))
    sums = Counter(written["figures"])
    for rise in written["rises"] or ():
        what, by, why = rise["what"], rise["by"], rise["why"]
        if not str(why).strip():
            raise ValueError(f"the rise of '{what}' in {BUDGET.name} names no reason")
        sums[what] += by
    return dict(sums)


def overdrawn(has: Figures, may: Figures) -> list[str]:
    """A sentence for each figure over its budget."""
    return [f"{what}: {count}, budget {may.get(what, 0)}" for what, count in has.items() if count > may.get(what, 0)]


def lower() -> None:
    """Write down what the tree has where that is less than the budget; rises that are not needed any more go."""
    has, may = figures(), allowed()
    written = yaml.safe_load(BUDGET.read_text(encoding="utf-8"))
    kept = []
    for rise in written["rises"] or ():
        if has.get(rise["what"], 0) > written["figures"].get(rise["what"], 0):
            kept.append(rise)
    raised = {rise["what"] for rise in kept}
    new = {
        what: written["figures"].get(what, 0) if what in raised else min(count, has.get(what, 0))
        for what, count in may.items()
    }
    head = "".join(
        line for line in BUDGET.read_text(encoding="utf-8").splitlines(keepends=True) if line.startswith("#")
    )
    rows = "".join(f"  {what}: {count}\n" for what, count in sorted(new.items()) if count or what in raised)
    rises = yaml.safe_dump({"rises": kept}, sort_keys=False, width=160)
    BUDGET.write_text(f"{head}figures:\n{rows}{rises}", encoding="utf-8")


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
    for what, count in has.items():
        print(f"{what:48} {count:6} {may.get(what, 0):6}{'  OVER' if count > may.get(what, 0) else ''}")
    kinds = {
        kind: sum(count for what, count in has.items() if what.endswith(f" {kind}"))
        for kind in ("statements", "signatures", "names", "placeholders")
    }
    print(", ".join(f"{count} {kind}" for kind, count in kinds.items()), "in all")
    return 1 if overdrawn(has, may) else 0


if __name__ == "__main__":
    if "--lower" in sys.argv[1:]:
        lower()
    sys.exit(_print_table())
