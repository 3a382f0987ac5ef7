"""Print the imports inside the package: its parts in layers, with imports pointing down, and import circles.

    python scripts/quality/draw_imports.py

A part is a folder, or a single file next to folders. Imports inside functions count, imports under `if TYPE_CHECKING:`
do not. Exit status 1 if there is a circle.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "verl_ext"
DIVIDED = ("", "integration")
"""Folders whose folders are parts of their own."""
Graph = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    paths = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imported(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, including inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module
        yield from imported(node, known)


def files_graph(root: Path) -> Graph:
    """Module to the modules that it imports."""
    known = modules(root)
    return {
        name: set(imported(ast.parse(path.read_text(encoding="utf-8")), known)) - {name} for name, path in known.items()
    }


def part_of(name: str, path: Path) -> str:
    """The folder of a module. A file beside folders is its own part.

    >>> part_of("verl_ext.core.steps", Path("verl_ext/core/steps.py"))
    'core'
    >>> part_of("verl_ext.settings", Path("verl_ext/settings.py"))
    'settings'
    """
    parts = name.split(".")[1:]
    folder = ".".join(parts if path.name == "__init__.py" else parts[:-1])
    return ".".join(parts) or "__init__" if folder in DIVIDED else folder


def parts_graph(root: Path) -> tuple[Graph, Counter[tuple[str, str]]]:
    """Part to the parts that it imports, and the number of imports per arrow."""
    known = modules(root)
    parts = {name: part_of(name, path) for name, path in known.items()}
    arrows: Counter[tuple[str, str]] = Counter()
    for name, others in files_graph(root).items():
        arrows.update((parts[name], parts[other]) for other in others if parts[other] != parts[name])
    graph: Graph = {part: set() for part in parts.values()}
    for source, target in arrows:
        graph[source].add(target)
    return graph, arrows


def circles(graph: Graph) -> list[list[str]]:
    """The members of each circle: those that import each other, directly or through others."""
    reached = {name: below(graph, name) for name in graph}
    found = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return sorted(map(list, found - {()}))


def below(graph: Graph, name: str) -> set[str]:
    """All that a node imports, directly or through others; itself only in a circle."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def layers(graph: Graph) -> list[list[str]]:
    """Parts by the length of the longest path down, lowest layer first. The members of a circle share a layer."""
    together = {name: tuple(part) for part in circles(graph) for name in part}
    height: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in height:
            part = together.get(name, (name,))
            below = {other for member in part for other in graph[member]} - set(part)
            value = 1 + max((level(other) for other in below), default=-1)
            height.update(dict.fromkeys(part, value))
        return height[name]

    grouped: defaultdict[int, list[str]] = defaultdict(list)
    for name in sorted(graph):
        grouped[level(name)].append(name)
    return [grouped[at] for at in sorted(grouped)]


def main() -> int:
    graph, arrows = parts_graph(ROOT)
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for name, path in modules(ROOT).items():
        sizes[part_of(name, path)].append(len(path.read_text(encoding="utf-8").splitlines()))
    for at, layer in reversed(list(enumerate(layers(graph)))):
        print(f"layer {at}")
        for name in layer:
            targets = ", ".join(f"{other} ({arrows[name, other]})" for other in sorted(graph[name]))
            print(f"  {name}: {len(sizes[name])} files, {sum(sizes[name])} lines{' -> ' + targets if targets else ''}")
    found = circles(graph) + circles(files_graph(ROOT))
    print(f"{len(graph)} parts, {len(arrows)} arrows, {sum(map(sum, sizes.values()))} lines, {len(found)} circles")
    for part in found:
        print(f"circle: {' <-> '.join(part)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
