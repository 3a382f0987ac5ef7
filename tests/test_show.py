from __future__ import annotations

import re

import numpy as np
import pytest

from tests.facts import says
from tests.integration.own_steps import Clip
from verl_ext import Batch, Settings, build
from verl_ext.cli import main
from verl_ext.core.chain import Chain
from verl_ext.core.steps import Centre, WeighAndSum
from verl_ext.estimators.compose import describe
from verl_ext.registry import BUILT_IN

BATCH = Batch.of(
    [[1.0, 3.0], [0.0, 1.0], [2.0, 0.0], [5.0, 0.0]],
    list("aabb"),
    keys=("x", "y"),
    lengths=[1, 2, 3, 4],
    accuracy=[1, 0, 0, 1],
)


def shown(capsys, *arguments):
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_it_prints_the_steps_their_formulas_and_the_settings_in_force(capsys):
    text = shown(capsys, "gdpo", "algorithm.gdpo.scale=mad", "+algorithm.rewards.keys=[x,y]")
    assert "arXiv 2601.05242" in text
    assert "A_ik = (r_ik - mean_g(r_k)) / (std_g(r_k) + epsilon)" in text
    numbered = re.findall(r"^  \d  (\w+) +(.*)$", text, re.MULTILINE)
    assert [name for name, _ in numbered] == ["centre", "scale_by_mad", "weigh_and_sum", "whiten"]
    assert all("x" in formula and formula.count("`") >= 2 for _, formula in numbered)
    for line in ("algorithm.gdpo.scale=mad", "algorithm.gdpo.epsilon=1e-06", "'algorithm.rewards.keys=[x,y]'"):
        assert f"  {line}\n" in text


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"compose"}))
@pytest.mark.parametrize(
    "more", [[], ["algorithm.gdpo.conditions={x:{on:y,at_least:0.5}}", "algorithm.hadw.base=gdpo"]]
)
def test_the_list_that_it_prints_is_the_estimator(name, more, capsys):
    pytest.importorskip("hydra")
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = {"rewards": {"keys": ["x", "y"]}}
    if more:
        given |= {"gdpo": {"conditions": {"x": {"on": "y", "at_least": 0.5}}}, "hadw": {"base": "gdpo"}}
    text = shown(capsys, name, *more)
    (override,) = re.findall(r"'\+(algorithm\.compose\.steps=.*)'", text)
    steps = OverridesParser.create().parse_override(override).value()
    composed = build("compose", Settings.parse({"compose": {"steps": steps}, "rewards": {"keys": ["x", "y"]}}))
    named = build(name, Settings.parse(given))
    assert composed == named
    np.testing.assert_array_equal(composed(BATCH).advantages, named(BATCH).advantages)


@pytest.mark.parametrize(
    ("doc", "found"),
    [
        ("Mine.\n\n    A = r\n    B = A\n", ["A = r", "B = A"]),  # nothing else is there, whose margin would count
        ("\nMine.\n\n  A = r\n", ["A = r"]),
        ("Mine.\n\n\tA = r\n\nText.\n", ["A = r"]),
        ("Mine.\n\nText:\n\n  A = r\n    B = A\n\n- text that\n  goes on\n", ["A = r", "B = A"]),
        ("Mine.\n\nText.\n", []),
        ("Mine.", []),
    ],
)
def test_a_formula_is_shown_however_it_is_indented(doc, found, capsys, monkeypatch):
    monkeypatch.setattr("verl_ext.estimators.drgrpo.__doc__", doc)
    text = shown(capsys, "drgrpo")
    assert text.startswith(
        "drgrpo: Mine.\n\n" + "\n".join(["formula", *(f"  {line}" for line in found), ""] if found else ["steps\n"])
    )


def test_settings_come_from_a_file_and_the_command_line_goes_before(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "algorithm:\n  dgpo: {dqw_temp: 5.0, dgae: false}\nactor_rollout_ref: {actor: {loss_agg_mode: token-sum}}\n"
    )
    text = shown(capsys, "--config", str(path), "dgpo", "algorithm.dgpo.dqw_temp=7")
    assert "dqw_temp=7" in text
    assert "scale_by_std" in text
    assert "balance " not in text
    assert "actor_rollout_ref.actor.loss_agg_mode=token-sum" in text


def test_a_list_of_one_s_own_is_shown_with_its_steps(capsys):
    text = shown(
        capsys,
        "compose",
        "algorithm.compose.steps=[weigh_and_sum,centre,{step:tests.integration.own_steps:Clip,limit:1.5}]",
    )
    assert "`x` between -limit and limit." in text
    assert "limit=1.5" in text
    assert "{step:tests.integration.own_steps:Clip,limit:1.5}]'" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], ("'compose', 'dgpo'", "python -m verl_ext show gdpo")),
        (["gdop"], ("'gdop'", "did you mean 'gdpo'")),
        (["gdpo", "algorithm.rewards.keys=[x"], ("'algorithm.rewards.keys=[x'", "[a,b]")),
        (["gdpo", "algorithm.gdpo.whiten=tokens"], ("algorithm.gdpo.whiten", "'tokens'", "'token'")),
        (["gdpo", "whiten"], ("whiten", "KEY=VALUE")),
        (["gdpo", "--config", "no/such.yaml"], ("no/such.yaml",)),
        (["compose"], ("algorithm.compose.steps=[...]",)),
        (["compose", "algorithm.compose.steps=[centr]"], ("'centr'", "did you mean 'centre'")),
        (["gdpo", "x.y=1"], ("'x.y'",)),
        (["gdpo", "algorithm.gdop.scale=mad"], ("did you mean 'algorithm.gdpo'",)),
        (["gdpo", "data.train_batch_size=8"], ("'data.train_batch_size'",)),
        (["gdpo", "+verl_ext=gdpo"], ("by its name alone", "'+verl_ext=gdpo'", "remove it")),
        (["gdpo", "~algorithm.gdpo"], ("'~algorithm.gdpo'",)),
        (["gdpo", "algorithm.gdpo.epsilon=1,2"], ("'algorithm.gdpo.epsilon=1,2'",)),
        (["gdpo", "${x}"], ("'${x}'", "KEY=VALUE")),
        (["gdpo", "algorithm.gdpo.scale=${x}"], ("algorithm.gdpo", "'x'")),
        (["gdpo", "algorithm.gdpo=${x}"], ("algorithm.gdpo", "'x'")),
        (["gdpo", "actor_rollout_ref.actor.loss_agg_mode=${x}"], ("actor_rollout_ref.actor.loss_agg_mode", "'x'")),
        (["gdpo", "actor_rollout_ref.actor.loss_agg_mode=[a]"], ("actor_rollout_ref.actor.loss_agg_mode",)),
        (["gdpo", "algorithm.gdpo=[1]", "algorithm.gdpo.scale=mad"], ("'algorithm.gdpo.scale=mad'",)),
        (["gdpo", f"algorithm.gdpo.epsilon={'1' * 5000}"], ("algorithm.gdpo.epsilon",)),
        (["gdpo", f"algorithm.rewards.keys={'[' * 2000}{']' * 2000}"], ("algorithm.rewards.keys",)),
    ],
)
def test_what_is_wrong_is_said_in_one_line_of_ours(arguments, told, capsys):
    assert main(["show", *arguments]) == 1
    said = capsys.readouterr()
    assert says(said.err, *told)
    assert said.err.startswith("ConfigurationError: ")
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("algorithm: {gdop: {scale: mad}}\n", ("algorithm.gdop", "did you mean algorithm.gdpo")),
        ("algorithm: {gdpo: {scale: '${nowhere}'}}\n", ("algorithm.gdpo", "'nowhere'")),
        ("algorithm: 3\n", ("algorithm", "section")),
        ("[1]\n", ("mapping",)),
        ("[" * 3000, ("mine.yaml",)),
        ("algorithm: \x00", ("mine.yaml",)),
    ],
)
def test_a_file_with_something_wrong_is_refused(text, told, capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["show", "gdpo", "--config", str(tmp_path / "mine.yaml")]) == 1
    assert says(capsys.readouterr().err, *told)


def test_the_rest_of_a_whole_configuration_is_none_of_its_business(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "trainer: {nnodes: 2, name: '${nowhere}'}\n"
        "algorithm: {adv_estimator: gae, gamma: 1.0, lam: 1.0, kl_ctrl: {type: fixed}, gdpo: {scale: '${x}'}}\n"
        "x: mad\n"
    )
    text = shown(capsys, "gdpo", "--config", str(path), "algorithm.norm_adv_by_std_in_grpo=True")
    assert "scale_by_mad" in text


@pytest.mark.parametrize("name", ["dgpo", "hadw"])
def test_the_list_has_the_accuracy_settings_in_force(name, capsys):
    main(["show", name, "algorithm.rewards.accuracy_key=x", "algorithm.rewards.accuracy_threshold=0"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "algorithm.adv_estimator=compose" in line]
    assert line.endswith(" +algorithm.rewards.accuracy_key=x +algorithm.rewards.accuracy_threshold=0.0")


def test_the_list_of_an_estimator_with_a_step_of_its_own_builds_the_same_chain():
    chain = Chain((WeighAndSum(), Centre(), Clip(1.5)))
    assert build("compose", Settings.parse({"compose": {"steps": describe(chain)}})) == chain
