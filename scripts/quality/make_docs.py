"""Write the generated pages of docs/: the settings, from their dataclasses, and the hooks, from their tables.

python scripts/quality/make_docs.py            # write docs/pages/settings.md and docs/pages/verl.md
python scripts/quality/make_docs.py --check    # exit status 1 if one of them is stale
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_ext.integration.compat.used import VERL
from verl_ext.integration.guards.guard import GUARDS

from verl_ext.integration.plugin import hooks_into_verl
from verl_ext.settings import sections

PAGES = Path(__file__).parents[2] / "docs" / "pages"
MADE = "<!-- Made by scripts/quality/make_docs.py: change the dataclasses or tables that it reads. -->"

SETTINGS = """# Settings

All settings are under `algorithm:` in verl's configuration. A preset (`+verl_ext=gdpo`) adds the sections `rewards`,
`verl_ext` and those of the estimator with these defaults, so that they can be set without `+`. Unknown names, wrong
types and values out of range raise an error before Ray starts. A setting that has no effect because of another one
raises an error or logs a warning.

verl's own `norm_adv_by_std_in_grpo=False` works with `gdpo` and `hadw`. `dgpo` raises an error, because it divides by
the mean absolute deviation (with `dgae=True`); `drgrpo` never divides. `use_kl_in_reward=True` adds the KL term to the
combined reward. `gdpo` has no combined reward and raises an error.
"""
PATCHED = """# What it changes in verl

verl imports the plugin in every process and hides what it raises, so the plugin only schedules hooks. A hook runs right
after verl has imported the module in the first column. It checks the names and signatures that it needs, then wraps.

## Essential: these fail closed

If this verl does not have what one of them needs, an error and a warning say so, this package's estimators refuse to
run, and everything else of verl goes on. `python -m verl_ext doctor` lists what moved.
"""
GUARDED = """## Guards: these fail open

They protect a run with an estimator of this package. A guard stops a run only with its own verdict. Where this verl,
Ray or file system does not have what it needs, it is off, with one warning, and training goes on.
"""
OFF = """`VERL_USE_EXTERNAL_PLUGINS=none` switches the whole plugin off.

A run with one of verl's own estimators trains as without this package. If they are set, it gets the curves of
`algorithm.rewards.keys`, the filter `any_reward`, and a dump of these rewards, with a lock on its folder. Then a key
that the samples lack and a reward that is not finite end the run. The start-up checks log warnings; they raise an error
only for wrong arguments or components of the included scorers, a conflict with a preset, values that Ray rejects, and a
dump's folder that cannot be written or is in use.
"""
CHECKED = """## What is checked before a hook is installed

Names and signatures only. The tests hold the source texts that this package relies on against the supported versions.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = []
    for name, text in pages().items():
        path = PAGES / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not options.check:
                path.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'stale' if options.check else 'written'}: {', '.join(stale)}")
    return 1 if options.check and stale else 0


def pages() -> dict[str, str]:
    """The generated pages by name."""
    return {"settings.md": "\n".join(settings()), "verl.md": "\n".join(patched())}


def settings() -> Iterator[str]:
    """A table per section."""
    yield f"{MADE}\n"
    yield SETTINGS
    for name, kind in sorted(sections().items(), key=lambda item: (item[0] not in ("rewards", "verl_ext"), item[0])):
        yield f"## algorithm.{name}\n"
        yield "| setting | default | what it does |"
        yield "|---|---|---|"
        says = docstrings(kind)
        for item in dataclasses.fields(kind):
            value = "null" if item.default is None else item.default
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
    limits = [f"{words[name]} {value:g}" for name, value in item.metadata.items() if value is not None]
    return f" ({', '.join(limits)})" if limits else ""


def patched() -> Iterator[str]:
    """Hooks, guards and what is checked."""
    yield f"{MADE}\n"
    yield PATCHED
    yield "| after the import of | what is done | for |"
    yield "|---|---|---|"
    for hook in hooks_into_verl():
        if hook.guard is None:
            yield f"| `{hook.module}` | {hook.does} | {hook.purpose} |"
    yield ""
    yield GUARDED
    yield "| switch under `algorithm.verl_ext` | what it does | what it wraps |"
    yield "|---|---|---|"
    for guard in GUARDS:
        wrapped = ", ".join(f"`{name}`" for name in guard.patches) or "nothing of verl"
        yield f"| `{guard.switch}=False` | {guard.protects} | {wrapped} |"
    yield ""
    yield OFF
    yield CHECKED
    for module, pins in VERL.items():
        names = ", ".join(f"`{pin.name}`" for pin in pins if pin.name)
        if names:
            yield f"- `{module}`: {names}"
    yield ""


if __name__ == "__main__":
    sys.exit(main())
