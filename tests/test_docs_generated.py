"""The pages that scripts/quality/make_docs.py writes: what they say agrees with the code that they are made from."""

import argparse
import dataclasses
import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts/quality"))

import make_docs  # noqa: E402
from generated_pages import command_line, markdown, methods, settings  # noqa: E402

import verl_ext  # noqa: E402
from verl_ext import Settings, build, cli  # noqa: E402
from verl_ext.checks import estimators  # noqa: E402
from verl_ext.methods import METHODS  # noqa: E402
from verl_ext.registry import sections  # noqa: E402
from verl_ext.tools.arguments import parse_settings  # noqa: E402

PAGES = {name: (ROOT / "docs/pages" / name).read_text(encoding="utf-8") for name in make_docs.BLOCKS_OF_PAGE}
REQUIRED = ["algorithm.saw.min_values=[-3.0,0.0]"]
"""The settings without a default, as on the command line."""


def cells_of_rows(page: str) -> list[list[str]]:
    """Return the cells of each row of the tables of a page, including the rows of headers."""
    rows = re.findall(r"^\| (.*) \|$", page, re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]


def rows_of_section(page: str, title: str) -> list[list[str]]:
    """Return the cells of each row of the tables in a section, including the rows of headers."""
    (section,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return cells_of_rows(section)


@pytest.fixture
def copied_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with copies of the generated pages, which the script reads and writes."""
    for name, text in PAGES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(make_docs, "PAGES", tmp_path)
    return tmp_path


def status_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Return the exit status of the script."""
    monkeypatch.setattr(sys, "argv", ["make_docs.py", *arguments])
    return make_docs.main()


@pytest.mark.parametrize("name", PAGES)
def test_a_stale_page_is_reported_and_then_written(name, copied_pages, monkeypatch, capsys):
    stale_text = PAGES[name].replace("# ", "# An old title ", 1)
    (copied_pages / name).write_text(stale_text, encoding="utf-8")
    assert status_of(monkeypatch, "--check") == 1
    assert capsys.readouterr().out == f"{name} is stale\n"
    assert (copied_pages / name).read_text(encoding="utf-8") == stale_text
    assert status_of(monkeypatch) == 0
    assert capsys.readouterr().out == f"{name} was written\n"
    assert (copied_pages / name).read_text(encoding="utf-8") == PAGES[name]
    assert status_of(monkeypatch, "--check") == 0


def test_a_missing_page_is_written(copied_pages, monkeypatch):
    (copied_pages / "reference/cli.md").unlink()
    assert status_of(monkeypatch, "--check") == 1
    assert status_of(monkeypatch) == 0
    assert (copied_pages / "reference/cli.md").read_text(encoding="utf-8") == PAGES["reference/cli.md"]


WITHOUT_VERL = """
import runpy, sys
sys.modules.update(dict.fromkeys(["hydra", "omegaconf", "pandas", "ray", "torch", "verl"]))
sys.path.insert(0, "scripts/quality")
sys.argv = ["make_docs.py", "--check"]
runpy.run_path("scripts/quality/make_docs.py", run_name="__main__")
"""


def test_pages_do_not_depend_on_verl_or_on_the_width_of_the_terminal():
    command = [sys.executable, "-c", WITHOUT_VERL]
    environment = {**os.environ, "COLUMNS": "40"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nrun python scripts/quality/make_docs.py"


@pytest.mark.parametrize("module", [markdown, methods], ids=lambda module: module.__name__)
def test_examples_of_the_script_work(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("name", PAGES)
def test_no_cell_is_empty(name):
    for cells in cells_of_rows(PAGES[name]):
        assert all(cells), cells


# reference/settings.md


SETTINGS_PAGE = PAGES["reference/settings.md"]


@pytest.mark.parametrize("name", sections())
def test_every_setting_is_listed_with_its_default(name):
    _header, *rows = rows_of_section(SETTINGS_PAGE, f"algorithm.{name}")
    fields = dataclasses.fields(sections()[name])
    assert [row[0] for row in rows] == [f"`{field.name}`" for field in fields]
    for field, (_, default, _) in zip(fields, rows, strict=True):
        if field.default is dataclasses.MISSING:
            assert default == "required"
        else:
            override = OverridesParser.create().parse_override(f"setting={default.split('`')[1]}")
            assert override.value() == field.default


@pytest.mark.parametrize(
    ("setting", "limits"),
    [("turn_discount", "(0 to 1)"), ("epsilon", "(above 0)"), ("history_window", "(at least 1)")],
)
def test_limits_of_a_number_stand_after_its_default(setting, limits):
    defaults = [row[1] for row in cells_of_rows(SETTINGS_PAGE) if row[0] == f"`{setting}`"]
    assert defaults
    for default in defaults:
        assert default.endswith(limits)


def test_limits_that_only_prevent_an_overflow_are_left_out():
    assert "e+30" not in SETTINGS_PAGE


def names_of_item(phrase: str) -> list[str]:
    """Return the methods that an item of the section on verl's settings names; `phrase` occurs in the item."""
    (item,) = [line for line in SETTINGS_PAGE.splitlines() if line.startswith("- ") and phrase in line]
    return re.findall("`(.*?)`", item)


def run_with(name: str, **algorithm: Any) -> Any:
    """Return what the checks read of a run with an estimator."""
    run_settings = Settings.parse({**methods.REQUIRED_SETTINGS, **algorithm})
    chain = build(name, run_settings)
    return SimpleNamespace(name=name, methods=(name,), settings=run_settings, chain=chain, select=lambda _: None)


def test_section_on_verl_settings_agrees_with_the_checks_about_the_standard_deviation():
    changed = names_of_item("division is removed")
    unchanged = names_of_item("Nothing changes")
    rejected = names_of_item("divide by another measure")
    assert sorted([*changed, *unchanged, *rejected]) == settings.METHODS_WITH_OWN_STEPS
    for name in settings.METHODS_WITH_OWN_STEPS:
        run = run_with(name, norm_adv_by_std_in_grpo=False)
        assert bool([*estimators.division_by_std(run)]) == (name in rejected), name
        assert (run.chain.steps == run_with(name).chain.steps) == (name not in changed), name


def test_section_on_verl_settings_agrees_with_the_checks_about_kl_in_the_reward():
    accepted = names_of_item("term is added")
    rejected = [*names_of_item("each reward separately"), *names_of_item("at least 0")]
    assert sorted([*accepted, *rejected]) == settings.METHODS_WITH_OWN_STEPS
    for name in settings.METHODS_WITH_OWN_STEPS:
        run = run_with(name, use_kl_in_reward=True)
        assert (estimators.why_not_kl_in_reward(run) is None) == (name in accepted), name


# reference/cli.md


COMMAND_PAGE = PAGES["reference/cli.md"]
PARSERS = cli.parsers()[1]


def section_of_command(name: str) -> str:
    """Return the text of a command's section."""
    (section,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", COMMAND_PAGE, re.MULTILINE | re.DOTALL)
    return section


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_argument_of_a_command_is_named(command):
    section = section_of_command(command)
    for action in PARSERS[command]._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        for name in action.option_strings or [action.metavar]:
            assert f"`{name}" in section, name


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_example_of_a_command_is_valid(command):
    section = section_of_command(command)
    (example,) = re.findall(r"^```bash\nverl-ext (.*)\n```", section, re.MULTILINE)
    name, *arguments = shlex.split(example)
    assert name == command
    PARSERS[command].parse_intermixed_args(arguments)


def test_repeated_arguments_refer_to_the_command_that_describes_them():
    assert "same as for [`check`](#check): `OVERRIDE`, `--config FILE`" in section_of_command("rehearse")
    assert "| `--rows N` | 100 |" in section_of_command("rehearse")  # differs from the one of check
    assert "| `--rows N` | 8 |" in section_of_command("check")


def action_of(*names: str, **keywords: Any) -> argparse.Action:
    """Return what argparse makes of an argument."""
    return argparse.ArgumentParser().add_argument(*names, **keywords)


@pytest.mark.parametrize(
    ("keywords", "usage"),
    [
        ({"metavar": "FILE"}, "verl-ext show FILE"),
        ({"metavar": "FILE", "nargs": "?"}, "verl-ext show [FILE]"),
        ({"metavar": "FILE", "nargs": "*"}, "verl-ext show [FILE ...]"),
        ({"metavar": "FILE", "nargs": "+"}, "verl-ext show FILE ..."),
    ],
)
def test_usage_shows_how_many_values_an_argument_takes(keywords, usage):
    assert command_line._usage("show", [action_of("files", **keywords)]) == usage


@pytest.mark.parametrize(
    ("names", "keywords", "row"),
    [
        (["-n", "--number"], {"metavar": "N", "default": 3, "help": "count (default: %(default)s)"}, ("3", "count")),
        (["--all"], {"action": "store_true", "help": "everything"}, ("none", "everything")),
        (["file"], {"metavar": "FILE", "help": "a file"}, ("required", "a file")),
        (["file"], {"metavar": "FILE", "nargs": "*", "help": "files (default: all)"}, ("all", "files")),
    ],
)
def test_default_of_an_argument_is_taken_from_its_help(names, keywords, row):
    argument = command_line._argument(action_of(*names, **keywords))
    assert (argument.default, argument.description) == row


# methods/index.md


METHODS_PAGE = PAGES["methods/index.md"]


def test_overview_lists_every_method_with_its_summary():
    rows = [cells for cells in cells_of_rows(METHODS_PAGE) if cells[0].startswith("[")]
    assert [re.findall("`(.*)`", name)[0] for name, _, _ in rows] == sorted(METHODS)
    for (_, _, summary), name in zip(rows, sorted(METHODS), strict=True):
        assert summary == METHODS[name].summary


METHODS_WITH_A_PAGE = sorted(
    name for name in METHODS.keys() - {"compose"} if (ROOT / f"docs/pages/methods/{name}.md").exists()
)
"""The page more.md has the steps of the other methods, which tests/test_docs_lists.py tests."""


@pytest.mark.parametrize("name", METHODS_WITH_A_PAGE)
def test_steps_of_the_overview_are_those_of_the_method(name):
    steps_of = dict(row for row in rows_of_section(METHODS_PAGE, "Steps") if row[0].startswith("`"))
    steps = steps_of[f"`{name}`"].strip("`")
    composed = build("compose", parse_settings([f"algorithm.compose.steps={steps}"]))
    assert composed.steps == build(name, parse_settings(REQUIRED)).steps


# reference/api.md


API_PAGE = PAGES["reference/api.md"]


def test_every_exported_name_is_on_the_page_once():
    paths = re.findall(r"^::: (.*)$", API_PAGE, re.MULTILINE)
    counts = Counter(path.rpartition(".")[2] for path in paths)
    for name in verl_ext.__all__:
        assert counts[name] == 1, name


def test_paths_lead_to_the_exported_objects():
    for path in re.findall(r"^::: (.*)$", API_PAGE, re.MULTILINE):
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        if name in verl_ext.__all__:
            assert value is getattr(verl_ext, name)


def test_example_of_the_page_works():
    example = doctest.DocTestParser().get_doctest(API_PAGE.replace("```", ""), {}, "reference/api.md", None, 0)
    results = doctest.DocTestRunner().run(example)
    assert results.attempted > 0
    assert results.failed == 0


DOCUMENTED_CODE = '''
class Sum:
    """Sum the values.

    >>> Sum().of([1, 2])
    3

    Edge case: without values, the sum is 0.
    """

    empty: int = 0
    """The sum of no values.

    >>> Sum.empty
    0"""
'''


def test_examples_of_docstrings_are_shown_as_code():
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(ROOT / "docs/doctests.py")
    with griffe.temporary_visited_package("sums", {"__init__.py": DOCUMENTED_CODE}, extensions=extensions) as package:
        lines_of_class = package["Sum"].docstring.value.splitlines()
        lines_of_attribute = package["Sum.empty"].docstring.value.splitlines()
    assert lines_of_class[2:7] == ["```pycon", ">>> Sum().of([1, 2])", "3", "```", ""]
    assert lines_of_attribute[2:] == ["```pycon", ">>> Sum.empty", "0", "```"]
