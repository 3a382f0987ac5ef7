"""Write docs/pages/settings.md from the dataclasses of the settings, and the table of lists.md from the simple methods.

python scripts/quality/make_docs.py            # write the pages
python scripts/quality/make_docs.py --check    # exit status 1 if one is stale
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_ext.core.chain import Chain
from verl_ext.core.step_lists import as_list
from verl_ext.methods.simple import SIMPLE_METHODS
from verl_ext.registry import sections
from verl_ext.settings import Settings
from verl_ext.tools.show import as_text

PAGES = Path(__file__).parents[2] / "docs/pages"
MADE = "<!-- Made by scripts/quality/make_docs.py: change the dataclasses that it reads. -->"

REQUIRED = {"saw": {"min_values": ()}}
"""Values for the table of steps of settings without a default, by method."""

SETTINGS = """# Settings

All settings are under `algorithm:` in verl's configuration. A preset (`+verl_ext=gdpo`) adds the sections `rewards`,
`verl_ext` and those of the estimator with these defaults, so that they can be set without `+`. Unknown names, wrong
types and values out of range raise an error before Ray starts.

The section of an estimator that the run does not use logs a warning, if a value differs from its default. A setting
that is valid but that the other values leave without effect, such as `gdpo.epsilon` with `gdpo.scale=none`, is not
reported in general.

verl's own `norm_adv_by_std_in_grpo=False` works with `gdpo`, `gd2po` and `hadw`, and takes `scale_by_std` out of the
[lists with a name](lists.md). `dgpo` raises an error, because it divides by the mean absolute deviation (with
`dgae=True`), and so do `dvao`, `corrgrpo` and `liteppo`; `drgrpo` and `maxrl` never divide by a std.
`use_kl_in_reward=True` adds the KL term to the combined reward. `gdpo` and `gd2po` have no combined reward, and `maxrl`
needs rewards of at least 0: all three raise an error.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    lists = PAGES / "lists.md"
    before, _, after = re.split(
        "(<!-- rows -->\n.*?<!-- end -->\n)", lists.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    texts = {PAGES / "settings.md": "\n".join(settings()), lists: f"{before}{rows()}{after}"}
    stale = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not options.check:
            path.write_text(texts[path], encoding="utf-8")
        print(f"{path.name} {'is stale' if options.check else 'written'}")
    return 1 if options.check and stale else 0


def rows() -> str:
    """A line for each method that is a list of built-in steps."""
    lines = ["<!-- rows -->", "| name | paper | in one line | steps | settings |", "|---|---|---|---|---|"]
    for name, method in SIMPLE_METHODS.items():
        section = None
        settings = ""
        if method.settings is not None:
            required = REQUIRED.get(name, {})
            section = method.settings(**required)
            settings = ", ".join(f"`{item.name}`" for item in dataclasses.fields(method.settings))
        steps = as_text(as_list(Chain(tuple(method.build(section, Settings())))))
        lines.append(f"| `{name}` | {method.paper} | {method.summary} | `{steps}` | {settings} |")
    return "\n".join([*lines, "<!-- end -->\n"])


def settings() -> Iterator[str]:
    """A table per section."""
    yield f"{MADE}\n"
    yield SETTINGS
    ours = {name: kind for name, kind in sections().items() if kind.__module__.startswith("verl_ext.")}
    for name, kind in sorted(ours.items(), key=lambda item: (item[0] not in ("rewards", "verl_ext"), item[0])):
        yield f"## algorithm.{name}\n"
        yield "| setting | default | what it does |"
        yield "|---|---|---|"
        bases = [base for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)]
        says = {name: text for base in bases for name, text in docstrings(base).items()}
        for item in dataclasses.fields(kind):
            value = {None: "null", dataclasses.MISSING: "must be set"}.get(item.default, item.default)
            yield f"| `{item.name}` | `{value}` | {says[item.name]}{_range(item)} |"
        yield ""


def docstrings(kind: type[Any]) -> dict[str, str]:
    """The docstring below each field of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = below.value if isinstance(below, ast.Expr) else None
            text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
            found[field.target.id] = " ".join(text.split()).replace("|", "\\|")
    return found


def _range(item: dataclasses.Field[Any]) -> str:
    words = {"low": "at least", "above": "above", "high": "at most"}
    limits = [f"{word} {item.metadata[name]:g}" for name, word in words.items() if item.metadata.get(name) is not None]
    return f" ({', '.join(limits)})" if limits else ""


if __name__ == "__main__":
    sys.exit(main())
