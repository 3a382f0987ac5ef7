"""The page on composing, followed to the letter."""

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

PAGE = (Path(__file__).parents[1] / "docs" / "pages" / "compose.md").read_text()
KEYS = "+algorithm.rewards.keys=[correctness,format]"
ACCURACY = "+algorithm.rewards.accuracy_key=correctness"
ROWS = [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
UIDS = list("aaaabb")
BATCH = Batch.of(ROWS, UIDS, keys=("correctness", "format"), accuracy=[row[0] for row in ROWS])


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def my_steps(tmp_path, monkeypatch):
    code, *_ = blocks("python")
    assert code.startswith("# my_steps.py\n")
    (tmp_path / "my_steps.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)


def test_a_fifth_estimator_as_the_page_writes_it(my_steps):
    (command,) = blocks("bash")
    words = shlex.split(command.replace("\\\n", " "))
    overrides = [word for word in words if "=" in word and not word.startswith("PYTHONPATH")]
    config = configuration(*overrides)
    check_run(config)
    found = build("compose", read_settings(config))(BATCH).advantages
    columns = [reference.over_std(list(column), UIDS, 0.0) for column in zip(*ROWS, strict=True)]
    total = reference.weighted_total(columns, [1.0, 1.0])
    assert max(map(abs, total)) > 1.5  # or nothing would be clipped
    np.testing.assert_allclose(found, np.clip(total, -1.5, 1.5), rtol=1e-12)


def test_the_named_estimator_as_the_page_writes_it(my_steps, tmp_path, monkeypatch):
    _, code, *_ = blocks("python")
    (toml,) = blocks("toml")
    group, name, target = re.fullmatch(r'\[project\.entry-points\."(.*)"\]\n(\w+) = "(.*)"\n', toml).groups()
    assert group == ENTRY_POINT_GROUP
    file = tmp_path / code.splitlines()[0].removeprefix("# ")
    file.parent.mkdir()
    file.write_text(code)
    monkeypatch.setitem(ESTIMATORS, name, EntryPoint(name, target, group))
    settings = Settings.parse({"rewards": {"keys": ["correctness", "format"]}, "clipped": {"limit": 1.5}})
    same = {"steps": ["center", "scale_by_std", "weighted_sum", {"step": "my_steps:Clip", "limit": 1.5}]}
    listed = build("compose", Settings.parse({**settings.given, "compose": same}))
    assert build("clipped", settings)(BATCH).advantages.tolist() == listed(BATCH).advantages.tolist()
    warned = load("clipped").rule(settings, lambda _: "token-sum")
    assert [finding.severity for finding in warned] == ["warning"]
    assert not list(load("clipped").rule(settings, lambda _: "token-mean"))


def test_the_list_in_yaml():
    (text,) = blocks("yaml")
    chain = build("compose", Settings.parse(yaml.safe_load(text)["algorithm"]))
    names = ["center", "scale_by_mad", "weighted_sum", "whiten", "weight_by_difficulty"]
    assert [step.name for step in chain.steps] == names
    assert chain.steps[-1].dqw_temp == 1.0


def test_what_show_prints(capsys):
    assert main(["show", "gdpo", "algorithm.gdpo.scale=mad"]) == 0
    printed = capsys.readouterr().out
    quoted = PAGE.split("$ python -m verl_ext show gdpo")[1].split("```")[0].splitlines()[1:]
    for line in quoted:
        assert line == "..." or line in printed, line


def test_every_combination_of_the_table_is_accepted():
    table = PAGE[PAGE.index("Combinations worth a try") :]
    lists = re.findall(r"^\| (.*?) \| `(\[.*?\])`", table, re.MULTILINE)
    assert len(lists) == 5
    for _, steps in lists:
        check_run(configuration("algorithm.adv_estimator=compose", KEYS, ACCURACY, f"+algorithm.compose.steps={steps}"))


@pytest.mark.parametrize(
    ("steps", "refused"),
    [
        ("[center,weighted_sum,drop_conflicts]", "drop_conflicts must come before the sum"),
        ("[weighted_sum,center,weight_by_difficulty,scale_by_std]", "weight_by_difficulty, has no effect"),
    ],
)
def test_the_lists_that_the_page_calls_refused_are_refused(steps, refused):
    with pytest.raises(ConfigurationError, match=refused):
        check_run(configuration("algorithm.adv_estimator=compose", KEYS, ACCURACY, f"+algorithm.compose.steps={steps}"))


def test_the_table_of_steps_names_every_step():
    table = PAGE.partition("| step | does | settings |")[2].partition("\n\n")[0]
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    assert {*re.findall(r"`(\w+)`", "\n".join(first_cells))} == {*STEPS}
