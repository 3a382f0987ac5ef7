"""The examples of docs/pages/methods/compose.md work as they are written."""

import re
import shlex
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests import reference
from tests.configs import compose as configuration
from verl_ext import Batch, Settings, build
from verl_ext.checks.judge import check_run
from verl_ext.cli import main
from verl_ext.core.step_lists import STEPS
from verl_ext.errors import ConfigurationError
from verl_ext.registry import ENTRY_POINT_GROUP, ESTIMATORS, load
from verl_ext.run_config import read_settings

PAGE = (Path(__file__).parents[1] / "docs/pages/methods/compose.md").read_text(encoding="utf-8")
KEYS = "+algorithm.rewards.keys=[correctness,format]"
ACCURACY = "+algorithm.rewards.accuracy_key=correctness"
ROWS = [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
UIDS = list("aaaabb")
BATCH = Batch.of(ROWS, UIDS, keys=("correctness", "format"), accuracy=[row[0] for row in ROWS])


def code_blocks(language):
    """Return the code blocks of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def my_steps(tmp_path, monkeypatch):
    """Write the module of the page's first Python block, and put it on the path."""
    code, *_ = code_blocks("python")
    assert code.startswith("# my_steps.py\n")
    (tmp_path / "my_steps.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)


def test_custom_step_of_the_command_line_clips_advantages(my_steps):
    (command,) = code_blocks("bash")
    words = shlex.split(command.replace("\\\n", " "))
    overrides = [word for word in words if "=" in word and not word.startswith("PYTHONPATH")]
    config = configuration(*overrides)
    check_run(config)
    chain = build("compose", read_settings(config))

    scaled_columns = [reference.over_std(list(column), UIDS, 0.0) for column in zip(*ROWS, strict=True)]
    total = reference.weighted_total(scaled_columns, [1.0, 1.0])
    assert max(map(abs, total)) > 1.5  # or nothing would be clipped
    np.testing.assert_allclose(chain(BATCH).advantages, np.clip(total, -1.5, 1.5), rtol=1e-12)


@pytest.fixture
def clipped(my_steps, tmp_path, monkeypatch):
    """Register the estimator `clipped` of the page's second Python block under its entry point."""
    _, code, *_ = code_blocks("python")
    (toml,) = code_blocks("toml")
    group, name, target = re.fullmatch(r'\[project\.entry-points\."(.*)"\]\n(\w+) = "(.*)"\n', toml).groups()
    assert group == ENTRY_POINT_GROUP
    assert name == "clipped"
    file = tmp_path / code.splitlines()[0].removeprefix("# ")
    file.parent.mkdir()
    file.write_text(code)
    monkeypatch.setitem(ESTIMATORS, name, EntryPoint(name, target, group))


CLIPPED_SETTINGS = {"rewards": {"keys": ["correctness", "format"]}, "clipped": {"limit": 1.5}}


def test_named_estimator_of_the_page_equals_its_list_of_steps(clipped):
    steps = ["center", "scale_by_std", "weighted_sum", {"step": "my_steps:Clip", "limit": 1.5}]
    named = build("clipped", Settings.parse(CLIPPED_SETTINGS))
    composed = build("compose", Settings.parse({**CLIPPED_SETTINGS, "compose": {"steps": steps}}))
    assert named(BATCH).advantages.tolist() == composed(BATCH).advantages.tolist()


def test_named_estimator_of_the_page_warns_of_another_loss(clipped):
    rule = load("clipped").rule
    settings = Settings.parse(CLIPPED_SETTINGS)
    findings = list(rule(settings, lambda _: "token-sum"))
    assert [finding.severity for finding in findings] == ["warning"]
    assert list(rule(settings, lambda _: "token-mean")) == []


def test_yaml_list_of_the_page_has_these_steps():
    (text,) = code_blocks("yaml")
    chain = build("compose", Settings.parse(yaml.safe_load(text)["algorithm"]))
    names = ["center", "scale_by_mad", "weighted_sum", "whiten", "weight_by_difficulty"]
    assert [step.name for step in chain.steps] == names
    assert chain.steps[-1].dqw_temp == 1.0


def test_show_prints_what_the_page_quotes(capsys):
    assert main(["show", "gdpo", "algorithm.gdpo.scale=mad"]) == 0
    printed = capsys.readouterr().out
    rest_of_the_block = PAGE.split("$ python -m verl_ext show gdpo")[1].split("```")[0]
    _, *quoted_lines = rest_of_the_block.splitlines()
    for line in quoted_lines:
        assert line == "..." or line in printed, line


def check_steps(steps):
    """Raise an error if a run with this list of steps would be rejected."""
    check_run(configuration("algorithm.adv_estimator=compose", KEYS, ACCURACY, f"+algorithm.compose.steps={steps}"))


def test_every_list_of_the_table_is_accepted():
    table = PAGE[PAGE.index("## Combinations worth trying") :]
    lists = re.findall(r"^\| (.*?) \| `(\[.*?\])`", table, re.MULTILINE)
    assert len(lists) == 5
    for _, steps in lists:
        check_steps(steps)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("[center,weighted_sum,drop_conflicts]", "drop_conflicts must come before the sum"),
        ("[weighted_sum,center,weight_by_difficulty,scale_by_std]", "weight_by_difficulty, has no effect"),
    ],
)
def test_list_that_the_page_calls_rejected_is_rejected(steps, message):
    with pytest.raises(ConfigurationError, match=message):
        check_steps(steps)


def test_table_of_steps_names_every_step():
    table = PAGE.partition("| step | effect | settings |")[2].partition("\n\n")[0]
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    names = re.findall(r"`(\w+)`", "\n".join(first_cells))
    assert set(names) == set(STEPS)
