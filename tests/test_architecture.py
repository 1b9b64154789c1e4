"""Imports go one way: a station uses the travellers and the stations before it, never one behind it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minserve"
# In the order in which a request passes them; a module may import from its own place and from places before it.
STATIONS = ["errors", "sampling_params", "events", "event_log", "request", "tasks", "text", "ops", "model", "kv"]
STATIONS += ["engine", "llm", "quantize", "simulate", "bench", "kernel_check", "commands", "cli"]
STATIONS += ["__init__", "__main__"]
MODULES = sorted(PACKAGE.rglob("*.py"))


def station(module: Path) -> str:
    return module.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_stations(module: Path) -> set[str]:
    """Which stations a file imports from, wherever in the file the import stands."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "minserve":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("minserve.")}
    return found - {"_core", "__version__"}


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_imports_go_one_way(module: Path) -> None:
    place = STATIONS.index(station(module))
    late = {s for s in imported_stations(module) if STATIONS.index(s) > place}
    assert not late, f"{module.name} imports from stations behind it: {late}"


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_a_file_holds_one_idea(module: Path) -> None:
    assert len(module.read_text(encoding="utf-8").splitlines()) <= 330
