"""The simulated policies: gradients against enumeration, fair conditions, and a page that shows what was stored."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from verl_ext import conf

SCRIPTS = str(Path(__file__).parents[1] / "scripts/evidence")
sys.path.insert(0, SCRIPTS)
policies = importlib.import_module("softmax_policies")
simulate = importlib.import_module("simulate_policies")
sys.path.remove(SCRIPTS)

SGD = policies.Condition()


@pytest.fixture
def one_prompt(monkeypatch):
    """One prompt with accuracy .02, three answers of 10 or 30 tokens, two rollouts."""
    monkeypatch.setattr(policies, "BATCH", 1)
    return policies.World(policies.Study("", (), (), ((1, 0), (0, 0), (0, 0)), rollouts=2, lengths=(10, 30)), seed=3)


def expected(world, arm):
    """The mean gradient over all pairs of responses, weighed by their probability under the policy."""
    learner, prompts = policies.Learner(world, arm), np.array([0])
    odds = learner.policy.probabilities(prompts)[0]
    return sum(
        odds[list(pair)].prod() * learner.gradient_of(prompts, np.array([pair]))
        for pair in itertools.product(range(len(odds)), repeat=2)
    )


def slope(world, function, size=1e-5):
    """The gradient of a function of the policy, by central differences."""
    policy, found = policies.Policy(world), []
    for at in range(policy.size):
        step = np.zeros(policy.size)
        step[at] = size
        policy.move(step)
        above = function(policy)
        policy.move(-2 * step)
        found.append((above - function(policy)) / (2 * size))
        policy.move(step)
    return np.array(found)


def test_drgrpos_expected_gradient_is_that_of_the_expected_reward(one_prompt):
    # The mean of the group includes the response itself: a factor of (G - 1) / G = 1/2. The loss divides by 30 tokens.
    truth = slope(one_prompt, lambda policy: policy.probabilities([0])[0] @ one_prompt.right)
    found = expected(one_prompt, policies.Arm("", "drgrpo", loss=policies.CONSTANT))
    assert np.abs(truth).max() > 0.005
    assert found == pytest.approx(truth / 2 / 30, abs=1e-9)


def test_only_the_division_by_the_length_spares_long_wrong_answers(one_prompt):
    # Outcomes: right 10, right 30, wrong 10, wrong 30, another wrong 10, 30; both lengths equally likely.
    def wrong_ones(loss):
        return expected(one_prompt, policies.Arm("", "drgrpo", loss=loss))[2:6].reshape(2, 2)

    short, long = wrong_ones(policies.CONSTANT).T
    assert long == pytest.approx(short, rel=1e-9)
    short, long = wrong_ones(policies.SEQUENCE).T
    assert (short < long).all()


def test_the_gradient_of_given_responses_is_that_of_their_log_probabilities():
    world = policies.World(simulate.STUDIES["hadw"], 5)
    draw = np.random.default_rng(1)
    prompts, drawn, factors = np.array([4, 9]), draw.integers(0, 8, size=(2, 4)), draw.normal(size=(2, 4))

    def objective(policy):
        return (factors * np.log(np.take_along_axis(policy.probabilities(prompts), drawn, axis=1))).sum()

    assert policies.Policy(world).gradient(prompts, drawn, factors) == pytest.approx(slope(world, objective), abs=1e-7)


def test_responses_are_drawn_with_the_policys_probabilities(monkeypatch):
    world = policies.World(simulate.STUDIES["dgpo"], 0)
    # Evenly spaced numbers in place of random ones: each response comes as often as its probability, to 1 in 1,000.
    world.uniform = np.broadcast_to((np.arange(1000) + 0.5) / 1000, (1, policies.BATCH, 1000))
    learner, seen = policies.Learner(world, policies.Arm("")), []
    monkeypatch.setattr(learner, "gradient_of", lambda prompts, drawn: seen.append((prompts, drawn)))
    learner.gradient(0)
    ((prompts, drawn),) = seen
    shares = (drawn[:, :, None] == np.arange(8)).mean(axis=1)
    assert shares == pytest.approx(learner.policy.probabilities(prompts), abs=1.01e-3)


@pytest.mark.parametrize("loss", [policies.SEQUENCE, policies.TOKEN, policies.CONSTANT])
def test_responses_are_weighed_as_verl_aggregates_the_loss(loss):
    torch = pytest.importorskip("torch")
    agg_loss = pytest.importorskip("verl.trainer.ppo.core_algos").agg_loss
    length, longest = np.array([3.0, 5.0, 1.0]), 8
    mask = (torch.arange(longest) < torch.tensor(length)[:, None]).double()
    losses = torch.rand(3, longest, generator=torch.Generator().manual_seed(0)).double()
    theirs = agg_loss(losses, mask, loss, loss_scale_factor=longest).item()
    ours = policies.loss_weights(loss, length, longest) @ (losses * mask).sum(-1).numpy()
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("name", ["dgpo", "drgrpo", "gdpo", "hadw"])
def test_an_estimator_has_the_loss_of_its_preset(name):
    actor = conf.read(name).get("actor_rollout_ref", {}).get("actor", {})
    arms = [arm for study in simulate.STUDIES.values() for arm in study.arms if arm.estimator == name]
    plain = [arm for arm in arms if not arm.settings]
    assert [arm.loss for arm in plain] == [actor.get("loss_agg_mode", "token-mean")]


@pytest.mark.parametrize("name", simulate.STUDIES)
def test_the_prompts_begin_with_the_accuracies_of_the_page(name):
    world = policies.World(simulate.STUDIES[name], 7)
    policy = policies.Policy(world).probabilities()
    assert policy[: policies.PROMPTS] @ world.right == pytest.approx(np.linspace(0.02, 0.9, policies.PROMPTS))
    found = world.measure(policy)
    assert found["length of wrong answers"] == pytest.approx(np.mean(simulate.STUDIES[name].lengths))
    assert found["format"] == pytest.approx(0.3 if name == "gdpo" else 0.0)


def test_all_other_prompts_together_move_a_prompt_as_much_as_its_own_parameters():
    # In the direction of right answers: its own parameters count 1, each of 60 prompts sharing / 60.
    world = policies.World(simulate.STUDIES["dgpo"], 0, sharing=1.0)
    shared = world.features[0, :, policies.SKILLS]
    assert shared @ shared * policies.PROMPTS == pytest.approx(1.0)
    assert not policies.World(simulate.STUDIES["dgpo"], 0, sharing=0.0).features.any()


def test_mixing_is_orthogonal_spreads_every_parameter_and_can_be_undone():
    mix, back = policies.mixture(7, seed=0)
    matrix = np.array([mix(row) for row in np.eye(7)])
    assert matrix @ matrix.T == pytest.approx(np.eye(7))
    assert (np.abs(matrix) > 0.01).all()
    assert back(mix(np.arange(7.0))) == pytest.approx(np.arange(7.0))


def test_adams_first_step_is_equally_large_for_every_estimator():
    world = policies.World(simulate.STUDIES["dgpo"], 0)
    mix, _ = policies.mixture(policies.Policy(world).size, seed=0)
    for arm in simulate.STUDIES["dgpo"].arms:
        gradient = np.abs(mix(policies.Learner(world, arm).gradient(0)))
        assert (gradient / (gradient + 1e-8)).mean() == pytest.approx(1.0, abs=1e-3)


def test_equal_estimators_show_no_difference():
    grpo = policies.Arm("one"), policies.Arm("other")
    study = policies.Study("", grpo, ("all prompts",), simulate.ONE_RIGHT)
    found = simulate.runs(study, SGD, {"one": 1.0, "other": 1.0}, range(3))
    gap = simulate.compare(*(found[arm.label]["all prompts"][:, -1] for arm in grpo))
    assert gap == {"difference": 0.0, "spread": 0.0, "p": 1.0, "seen": 0.0}


def test_a_seed_gives_the_same_run_and_another_seed_another():
    study, arm = simulate.STUDIES["hadw"], simulate.STUDIES["hadw"].arms[1]
    first, again, other = (
        policies.train(policies.World(study, seed), arm, 1.0, simulate.CONDITIONS["Adam"]) for seed in (1, 1, 2)
    )
    assert all((first[name] == again[name]).all() for name in study.measures)
    assert all(first[name][-1] != other[name][-1] for name in study.measures)


def test_the_difference_is_tested_in_pairs_and_what_would_be_seen_is_seen_in_four_of_five():
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(0)
    base, noise = draw.normal(size=40), draw.normal(size=40)
    found = simulate.compare(base, base + 0.2 * noise + 0.05)
    assert found["p"] == pytest.approx(stats.ttest_rel(base + 0.2 * noise + 0.05, base).pvalue)
    # The power of the t test against a true difference of that size, by the noncentral t distribution.
    shift, limit = found["seen"] / (found["spread"] / 40**0.5), stats.t.ppf(0.975, 39)
    assert stats.nct.sf(limit, 39, shift) == pytest.approx(0.8, abs=0.01)


@pytest.fixture(scope="module")
def results():
    return json.loads(simulate.RESULTS.read_text(encoding="utf-8"))


def calibration(key, condition, seeds):
    study = simulate.STUDIES[key]
    return study, [policies.World(study, seed, condition.sharing) for seed in seeds]


@pytest.mark.parametrize("key", simulate.STUDIES)
def test_under_same_step_all_first_steps_are_equally_large(results, key):
    study, worlds = calibration(key, simulate.CONDITIONS["SGD, same step"], policies.SIZES)
    rate = results["studies"][key]["SGD, same step"]["rates"]
    sizes = [rate[arm.label] * policies.step_size(worlds, arm) for arm in study.arms]
    assert sizes == pytest.approx([sizes[0]] * len(sizes), rel=1e-3)


@pytest.mark.parametrize(("key", "name"), [*itertools.product(simulate.STUDIES, simulate.CONDITIONS)])
def test_grpo_closes_half_of_its_gap_on_seeds_that_are_not_compared(results, key, name):
    assert not {*policies.CALIBRATION, *policies.SIZES} & set(simulate.SEEDS)
    condition = simulate.CONDITIONS[name]
    study, worlds = calibration(key, condition, policies.CALIBRATION)
    rate = results["studies"][key][name]["rates"][study.arms[0].label]
    curves = [policies.train(world, study.arms[0], rate, condition)["all prompts"] for world in worlds]
    first, last = np.mean(curves, axis=0)[[0, -1]]
    assert 0.5 <= round((last - first) / (1 - first), 3) < 0.515


@pytest.mark.parametrize(("key", "name"), [("hadw", "SGD, same step"), ("gdpo", "Adam")])
def test_the_rule_gives_the_stored_rates(results, key, name):
    found = policies.rates(simulate.STUDIES[key], simulate.CONDITIONS[name])
    assert found == pytest.approx(results["studies"][key][name]["rates"], rel=1e-3)


def test_two_seeds_give_the_stored_values_and_others_are_noticed(results):
    assert simulate.differences(results, list(simulate.STUDIES)) == []
    changed = copy.deepcopy(results)
    changed["studies"]["dgpo"]["Adam"]["first_seeds"]["dgpo"]["hardest third"][1] += 1e-5
    (wrong,) = simulate.differences(changed, ["dgpo"])
    assert wrong.startswith("dgpo, Adam, dgpo, hardest third")


def test_the_page_shows_the_stored_results(results):
    page, rest = simulate.PAGE.read_text(encoding="utf-8"), simulate.REST.read_text(encoding="utf-8")
    assert simulate.filled(page, simulate.blocks(results)) == page
    assert simulate.filled(rest, simulate.other_blocks(results)) == rest
    assert results["seeds"] == len(simulate.SEEDS)
    # Every signed figure in the text, outside of the tables, stands in a table.
    parts = re.split(r"<!-- made:.*?<!-- end -->", page, flags=re.S)
    tables = " ".join([*simulate.blocks(results).values(), *simulate.other_blocks(results).values()])
    for figure in re.findall(r"[+-]\d+\.\d+", " ".join(parts)):
        assert figure in tables, figure


def test_a_page_without_the_place_for_a_table_is_an_error():
    with pytest.raises(ValueError, match="made: dgpo"):
        simulate.filled("# Nothing", {"dgpo": "| a |"})


def test_only_what_is_missing_is_run_and_everything_is_drawn(results, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    stored = copy.deepcopy(results)
    lost = stored["studies"]["gdpo"].pop("Adam")
    texts = {
        "RESULTS": json.dumps(stored),
        "PAGE": simulate.PAGE.read_text(),
        "REST": simulate.REST.read_text(),
        "PICTURE": "",
    }
    for name, text in texts.items():
        path = tmp_path / f"{name}.png"
        path.write_text(text)
        monkeypatch.setattr(simulate, name, path)
    monkeypatch.setattr(simulate, "SEEDS", range(3))
    monkeypatch.setattr(simulate, "rates", lambda *_: lost["rates"])
    monkeypatch.setattr(sys, "argv", ["simulate", "--missing"])
    assert simulate.main() == 0
    found = json.loads(simulate.RESULTS.read_text())["studies"]
    assert found["gdpo"]["Adam"]["first_seeds"] == lost["first_seeds"]
    assert [*found["gdpo"]] == [*simulate.CONDITIONS]
    assert {**found["gdpo"], "Adam": 0} == {**results["studies"]["gdpo"], "Adam": 0}
    assert simulate.PICTURE.stat().st_size > 10_000
    for page, made in ((simulate.PAGE, simulate.blocks), (simulate.REST, simulate.other_blocks)):
        assert simulate.filled(page.read_text(), made({"studies": found})) == page.read_text()


def test_a_study_that_does_not_exist_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulate", "dapo"])
    with pytest.raises(SystemExit) as stopped:
        simulate.main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in simulate.STUDIES)
