"""Who imports whom: the tables under "Rooms" of docs/architecture.md, enforced by walking every import of the package.

A package with a table of its own is a floor, and its modules are rooms. A cell of a table's last column lists names
separated by commas. The standard library, a room's own modules and the version are always allowed; "all of the above"
means the rooms of earlier rows, "anything above" also what those may import.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jax_bwgemm"
FLOORS = ("facts", "planner", "runtime", "ops")  # imports go to the left
SURFACE = {"__init__"}  # may import every room: it only gives them names
ENTRY = {"__main__": {"cli"}}
DRAWING = {"rich", "matplotlib", "lightgbm"}  # for rooms that may import "anything above": extras build, bench and plot
COMPANIONS = {"cutlass": {"cuda"}}  # cuda.bindings comes with the DSL and is part of its signatures
ANYTHING, ALL = "anything above", "all of the above"


def rooms_of_table() -> dict[str, set[str]]:
    """{room: names that it may import}, from the document."""
    allowed: dict[str, set[str]] = {}
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    for cell, imports in re.findall(r"^\| (`.*?) \|.*\| (.*?) \|$", text, re.MULTILINE):
        if "C++" in cell:
            continue
        rooms = set(re.findall(r"`([\w/]+?)/?`", cell))
        allowed |= dict.fromkeys(rooms, _names(imports, allowed) | rooms)
    return allowed


def _names(imports: str, above: dict[str, set[str]]) -> set[str]:
    names: set[str] = set()
    for part in (part.strip() for part in imports.replace("`", "").split(",")):
        if part in (ALL, ANYTHING):
            names |= above.keys()
        if part == ANYTHING:
            names |= set().union(*above.values()) - {"cutlass", "cuda"} | DRAWING
        elif re.fullmatch(r"[a-z_]+", part) and part != "nothing":
            names |= {part} | COMPANIONS.get(part, set())
        elif part not in (ALL, ANYTHING, "nothing", "nothing of ours"):
            raise ValueError(f"the table requires names separated by commas, got {part!r} in {imports!r}")
    return names


def floors_of_tables() -> dict[str, str]:
    """{room: the package in whose table it stands}, from the document."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    tables = re.findall(r"^### `(\w+)/`(.*?)(?=^### |\Z)", text, re.MULTILINE | re.DOTALL)
    return {room: floor for floor, table in tables for room in re.findall(r"^\| `(\w+)`", table, re.MULTILINE)}


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[1] if parts[0] in FLOORS else parts[0]


def imports_of(source: str) -> set[str]:
    """What a file imports anywhere in it: rooms of ours, and the top-level names of others."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {_room_or_package(name.split(".")) for name in found} - sys.stdlib_module_names


def _room_or_package(parts: list[str]) -> str:
    if parts[0] != PACKAGE.name:
        return parts[0]
    if len(parts) > 1 and parts[1] in FLOORS:
        is_room = len(parts) > 2 and (PACKAGE / parts[1] / f"{parts[2]}.py").exists()
        return parts[2] if is_room else parts[1]
    is_room = len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists())
    return parts[1] if is_room else "__init__"


def violations(path: Path, source: str, allowed: dict[str, set[str]]) -> list[str]:
    room = room_of(path)
    if room in SURFACE:
        return []
    if room not in allowed:
        return [f"{path.name}: the table of docs/architecture.md requires a row for the room {room!r}, got none"]
    legal = allowed[room] | {room, "_version"} | ({"__init__"} if room in ("bench", "cli") else set())
    return [f"{path.name}: {room} may not import {name}" for name in sorted(imports_of(source) - legal)]


ALLOWED = rooms_of_table() | {"_version": set()} | ENTRY
PLACES = floors_of_tables()
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "_artifacts" not in path.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_table(path: Path) -> None:
    assert violations(path, path.read_text(), ALLOWED) == []


def test_table_names_only_rooms_that_exist() -> None:
    assert set(ALLOWED) - {room_of(path) for path in FILES} == set()


def test_a_room_is_on_the_floor_of_its_table() -> None:
    found = {room_of(path): path.parent.name for path in FILES if path.parent.name in FLOORS}
    assert {room: floor for room, floor in found.items() if room != "__init__"} == PLACES


def loads(source: str) -> set[str]:
    """The modules of ours that a file imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {_module(f"{node.module}.{alias.name}") or str(node.module) for alias in node.names}
    return set(filter(None, map(_module, found)))


def _module(name: str) -> str | None:
    """`name`, if it is a module of ours."""
    place = PACKAGE.parent / name.replace(".", "/")
    is_ours = place.with_suffix(".py").exists() or (place / "__init__.py").exists()
    return name if is_ours and name.partition(".")[0] == PACKAGE.name else None


def test_no_module_needs_itself_to_be_imported() -> None:
    """Else it depends on who is imported first whether it can be."""
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    graph = {name.removesuffix(".__init__"): loads(path.read_text()) for name, path in modules.items()}
    assert "jax_bwgemm.bench.candidates" in graph["jax_bwgemm.bench.tune"]
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules


def test_imports_between_floors_go_down() -> None:
    assert [
        f"{room} of {floor} may import {name} of {PLACES[name]}"
        for room, floor in PLACES.items()
        for name in ALLOWED[room] & PLACES.keys()
        if FLOORS.index(PLACES[name]) > FLOORS.index(floor)
    ] == []


@pytest.mark.parametrize(
    ("name", "source", "culprit"),
    [
        ("facts/tile.py", "import jax", "jax"),
        ("facts/tile.py", "def f():\n    from jax_bwgemm.planner import plan", "plan"),
        ("facts/problem.py", "from jax_bwgemm.facts.arch import Arch", "arch"),
        ("planner/plan.py", "import jax_bwgemm", "__init__"),
        ("emulator/parser.py", "from jax_bwgemm.facts.tile import Tile", "tile"),
        ("kernels/sm90.py", "import jax.numpy as jnp", "jax"),
        ("cli/doctor.py", "import cutlass", "cutlass"),
    ],
)
def test_a_forbidden_import_is_found(name: str, source: str, culprit: str) -> None:
    (message,) = violations(PACKAGE / name, source, ALLOWED)
    assert message.endswith(f"may not import {culprit}")


def test_an_unknown_room_is_found() -> None:
    (message,) = violations(PACKAGE / "attic.py", "", ALLOWED)
    assert "requires a row for the room 'attic'" in message
