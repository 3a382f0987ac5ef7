"""Who may import whom: the parts of the package form layers, and every import goes down."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DRAW = runpy.run_path(str(ROOT / "scripts/quality/draw_imports.py"))

LAYERS = (
    ("__init__", "errors", "files", "integration"),
    ("core", "integration.hooks", "registry", "cli"),
    ("__main__", "cpu", "integration.components", "rewards", "settings"),
    ("conf", "estimators"),
    ("integration.checks", "integration.plugin", "tools"),
    ("integration.driver", "integration.run", "tools.compare", "tools.report"),
    ("integration.checkpoint", "integration.doctor", "integration.dump", "integration.sampling", "integration.skip"),
    ("integration.advantage",),
    ("integration.default_trainer", "integration.ray_trainer"),
)
"""The lowest first. A part imports parts of lower layers only."""
HEIGHT = {part: at for at, layer in enumerate(LAYERS) for part in layer}
PURE = ("core", "estimators", "settings", "registry", "errors", "files", "__init__")
MAY_IMPORT_VERL = ("integration", "cpu")


def test_every_part_has_a_layer_and_imports_go_down():
    graph, arrows = DRAW["parts_graph"](ROOT)
    assert set(graph) == set(HEIGHT)
    upward = [f"{source} -> {target}" for source, target in arrows if HEIGHT[source] <= HEIGHT[target]]
    assert not upward


def test_no_file_imports_itself_round_a_circle():
    assert DRAW["circles"](DRAW["files_graph"](ROOT)) == []


def test_a_circle_and_an_upward_arrow_would_be_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert DRAW["circles"](graph) == [["a", "b", "c"]]
    assert DRAW["layers"](graph) == [["a", "b", "c"], ["d"]]


def imports_from_outside(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize(("name", "path"), DRAW["modules"](ROOT).items())
def test_only_the_integration_knows_verl_and_the_core_knows_torch_and_numpy_alone(name, path):
    part, found = DRAW["part_of"](name, path), set(imports_from_outside(path))
    if part.split(".")[0] not in MAY_IMPORT_VERL:
        assert not found & {"verl", "ray", "transfer_queue"}
    if part in PURE:
        assert not found & {"omegaconf", "hydra", "pandas", "matplotlib"}
    if name != "verl_ext.integration.components":
        assert "transfer_queue" not in found  # so that another store of rollouts needs changes in one file
