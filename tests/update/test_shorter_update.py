"""Rows without advantage are left out, and a prompt is computed once: the gradient stays, and all ranks agree."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.configs import compose
from tests.facts import facts
from tests.update import update_tasks as tasks
from tests.update import updates
from verl_ext import hooks, update
from verl_ext.errors import IntegrationError
from verl_ext.trainers.mixin import TrainerMixin, with_mixin
from verl_ext.update import SHARE_MARK, SKIP_MARK, engine, split
from verl_ext.update import order as order_module
from verl_ext.update.order import order as order_of

FIGURES = ("actor/rows_kept", "actor/tokens_kept", "actor/prompt_tokens_saved", "actor/prompts_recomputed")
SLOW = pytest.mark.slow


def difference(gradients, reference):
    return float((gradients - reference).norm() / reference.norm())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cases", [3, pytest.param(48, marks=SLOW, id="all")])
def test_gradients_are_those_of_verl(folder, ranks, cases, record_property):
    """No difference is more than twice the largest of the controls: verl's own, which sum in another order.

    A control has other micro-batches, and another function of attention: other micro-batches leave most sums the same.
    """
    found = [case for rank in tasks.run("equal", ranks, folder, cases=cases) for case in rank.values()]
    assert len(found) >= ranks * cases
    largest = {
        way: max(difference(case[way]["gradients"], case["all"]["gradients"]) for case in found if way in case)
        for way in tasks.WAYS
    }
    record_property("largest", str(largest))
    assert max(largest.values()) <= 2 * largest["control"]
    assert largest["control"] < 1e-5
    for case in found:
        assert not any(name in FIGURES for name in case["all"]["metrics"])
        metrics = {
            way: {name: torch.tensor(value).double().mean() for name, value in case[way]["metrics"].items()}
            for way in case
        }
        for way in case.keys() - {"all", "control"}:
            assert (metrics[way]["actor/rows_kept"] < 0.8) == (way != "share")
            assert ("actor/prompt_tokens_saved" in metrics[way]) == (way != "skip")


@SLOW
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_updates_with_adamw(folder, ranks, record_property):
    for found in tasks.run("twenty", ranks, folder):
        assert len(found["all"]["gradients"]) == 20
        for name in ("gradients", "weights"):
            errors = {way: difference(found[way][name], found["all"][name]) for way in tasks.WAYS}
            record_property(name, str(errors))
            assert max(errors.values()) <= 2 * errors["control"] < 1e-4


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, 50), pytest.param(2, 200, marks=SLOW), pytest.param(4, 200, marks=SLOW)]
)
def test_no_split_hangs(tmp_path, ranks, cases):
    """All ranks have the same number of micro-batches, none of them empty, and every live row ran once."""
    found = tasks.run("splits", ranks, tmp_path, cases=cases)
    for splits in zip(*found, strict=True):
        assert len({len(report["ran"]) for report in splits}) == 1
        for report in splits:
            assert report["fits"]
            assert all(report["ran"])
            with_tokens = sum(any(report["counted"][row] for row in batch) for batch in report["ran"])
            assert with_tokens == min(len(report["ran"]), sum(report["counted"]))
            ran = [row for batch in report["ran"] for row in batch]
            assert len(set(ran)) == len(ran) == round(report["rows_kept"] * len(report["live"]))
            assert {row for row, live in enumerate(report["live"]) if live} <= set(ran)
            places = [place for batch in report["places"] for place in batch]
            assert [sorted(ran)[place] for place in places] == ran
    every = [report for splits in found for report in splits]
    assert min(report["rows_kept"] for report in every) < 0.2
    assert max(report.get("prompt_tokens_saved", 0) for report in every) > 0.2
    assert max(report.get("prompts_recomputed", 0) for report in every) > 0


@pytest.mark.parametrize("nested", [True, False])
def test_a_row_without_tokens_in_the_loss_comes_last_whatever_its_advantages(nested):
    data = updates.rows(4, [True, True, False, True], seed=0, nested=nested, lengths=([6] * 4, [3, 4, 5, 9]))
    updates.no_tokens(data, (0, 1, 3))  # padding, or rejected
    rows = split.row_lengths(data, share=False)
    live, others = split.live_rows(data, rows, skip=True)
    assert (live, others[0]) == ([], 2)
    live, others = split.live_rows(data, rows, skip=False)
    assert (live, sorted(others)) == ([2], [0, 1, 3])


def test_no_loss_waits_for_a_rank_without_live_rows_or_raises_for_a_prompt_without_tokens(folder):
    """verl's bypass_mode raises for a micro-batch without a token, and the other ranks would wait for ever."""
    for found in tasks.run("losses", 2, folder):
        for (loss, way), gradients in found.items():
            assert difference(gradients, found[loss, "all"]) < 1e-5, (loss, way)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_prompts_stay_whole_where_there_is_room(ranks, seed):
    """Each rank has as many rows, and a prompt is in more than one mini-batch of a rank as often as the count says."""
    draw = random.Random(seed)
    size = draw.choice([4, 8, 12])  # of a rank's mini-batch
    count = 3 * size * ranks
    rows = [(draw.randrange(max(1, count // 4)), draw.choice([30, 31]), draw.randrange(1, 40)) for _ in range(count)]
    order, divided = order_of(rows, ranks=ranks, mini_batch=size * ranks)
    assert sorted(row for rank in order for row in rank) == list(range(count))
    assert {len(rank) for rank in order} == {count // ranks}
    places = {(rows[row][:2], rank, at // size) for rank, part in enumerate(order) for at, row in enumerate(part)}
    assert len(places) - len({row[:2] for row in rows}) == divided
    even = [(number // 4, 20 + number // 4, 1 + number % 7) for number in range(count)]
    order, divided = order_of(even, ranks=ranks, mini_batch=size * ranks)
    assert divided == 0
    tokens = [sum(20 + row // 4 for row in part[::4]) for part in order]
    assert max(tokens) < 1.2 * min(tokens)


def test_rows_that_ranks_cannot_share_equally_are_refused():
    with pytest.raises(IntegrationError, match=facts("3", "2", "algorithm.verl_ext.share_prompts=False")):
        order_of([("a", 5, 1)] * 3, ranks=2, mini_batch=2)


class Workers:
    """Stands in for a group of workers."""

    def __init__(self, *states):
        self.states, self.asked = states, 0

    def execute_all_sync(self, method, function):
        assert method == "execute_func_rank_zero"
        assert function is update.install_engine
        self.asked += 1
        return list(self.states)


class Passes:
    """Stands in for verl's trainer: it keeps what each of its passes is given."""

    def __init__(self, config, group, ref_group=None):
        self.actor_rollout_wg, self.ref_policy_wg, self.given = group, ref_group, []

    def _balance_batch(self, batch, metrics):
        """As `PPOTrainer`, which returns another batch."""
        return SimpleNamespace(balanced=batch)

    def _compute_old_log_prob(self, batch):
        self.given.append(dict(vars(batch).popitem()[1]))

    _compute_ref_log_prob = _update_actor = _compute_old_log_prob


Trainer = with_mixin(TrainerMixin, Passes)


def configuration(*settings):
    on = (f"+algorithm.verl_ext.{name}=True" for name in settings)
    return compose("actor_rollout_ref.actor.use_dynamic_bsz=True", *on)


def trainer_with(group, *settings):
    return Trainer(configuration(*settings), group)


@pytest.mark.parametrize(
    ("settings", "marks"),
    [
        ((), {}),
        (("skip_zero_advantage",), {SKIP_MARK: True}),
        (("share_prompts", "skip_zero_advantage"), {SKIP_MARK: True, SHARE_MARK: True}),
    ],
)
@pytest.mark.parametrize("name", ["extra_info", "meta_info"])
@pytest.mark.parametrize("method", ["_compute_old_log_prob", "_compute_ref_log_prob", "_update_actor"])
def test_a_pass_is_marked_and_its_data_does_not_stay_so(settings, marks, name, method):
    group, entries = Workers("", ""), {"temperature": 1.0}
    trainer = trainer_with(group, *settings)
    for _ in range(2):
        getattr(trainer, method)(SimpleNamespace(**{name: entries}))
        assert entries == {"temperature": 1.0}
    assert trainer.given == [{"temperature": 1.0, **marks}] * 2
    assert group.asked == bool(marks)


def test_a_pass_that_fails_does_not_leave_its_data_marked():
    class Fails(Passes):
        def _update_actor(self, batch):
            raise ValueError("out of memory")

    trainer = with_mixin(TrainerMixin, Fails)(configuration("skip_zero_advantage"), Workers(""))
    entries = {"temperature": 1.0}
    with pytest.raises(ValueError, match="memory"):
        trainer._update_actor(SimpleNamespace(extra_info=entries))
    assert entries == {"temperature": 1.0}


@pytest.mark.parametrize("group", ["actor_rollout_wg", "ref_policy_wg"])
def test_a_rank_without_the_package_is_named_before_the_first_pass(group):
    groups = {"actor_rollout_wg": Workers("", ""), "ref_policy_wg": Workers("", "")}
    groups[group] = Workers("", "no such module")
    trainer = Trainer(configuration("share_prompts"), groups["actor_rollout_wg"], groups["ref_policy_wg"])
    with pytest.raises(IntegrationError, match=facts("[1]", group, "no such module")):
        trainer._update_actor(SimpleNamespace(meta_info={}))
    assert trainer.given == []


class BalancesInPlace(Passes):
    """As `RayPPOTrainer`, which returns nothing."""

    def _balance_batch(self, batch, metrics): ...


@pytest.mark.parametrize(("settings", "calls"), [((), 0), (("skip_zero_advantage",), 0), (("share_prompts",), 1)])
def test_the_rows_of_the_balanced_batch_are_ordered_only_to_share_prompts(settings, calls, monkeypatch):
    ordered = []
    monkeypatch.setattr(order_module, "reorder", lambda *given: ordered.append(given))
    batch, metrics = SimpleNamespace(), {}
    trainer = trainer_with(Workers(""), *settings)
    balanced = trainer._balance_batch(batch, metrics)
    assert balanced.balanced is batch
    assert ordered == [(trainer, balanced, metrics)] * calls
    ordered.clear()
    in_place = with_mixin(TrainerMixin, BalancesInPlace)(configuration(*settings), Workers(""))
    assert in_place._balance_batch(batch, metrics) is None
    assert ordered == [(in_place, batch, metrics)] * calls


def test_a_subclass_whose_update_would_skip_the_marks_is_rejected_only_with_these_settings():
    class Skips(Trainer):
        def _update_actor(self, batch): ...

    Skips(compose("+algorithm.rewards.keys=[acc]"), Workers(""))
    for setting in ("skip_zero_advantage", "share_prompts"):
        with pytest.raises(IntegrationError, match=facts("Skips._update_actor", "super()._update_actor")):
            Skips(configuration(setting), Workers(""))


def test_an_engine_that_cannot_read_the_marks_rejects_the_run_in_the_trainer_with_its_problem(monkeypatch):
    def fail():
        raise IntegrationError("no such function")

    monkeypatch.setattr(engine, "install", fail)
    with pytest.raises(IntegrationError, match=facts("no such function", "algorithm.verl_ext.share_prompts=False")):
        trainer_with(Workers(""), "share_prompts")


class OtherParameters(Passes):
    """A trainer of a verl whose update has another parameter."""

    __module__ = hooks.TRAINERS[True]

    def _balance_batch(self, batch, metrics): ...

    def _compute_old_log_prob(self, batch): ...

    def _compute_ref_log_prob(self, batch): ...

    def _update_actor(self, rows): ...


def test_a_trainer_of_verl_whose_update_has_changed_is_rejected_only_with_these_settings():
    other = with_mixin(TrainerMixin, OtherParameters)
    dynamic = "actor_rollout_ref.actor.use_dynamic_bsz=True"
    other(compose(dynamic, "+algorithm.rewards.keys=[acc]"), Workers(""))
    with pytest.raises(IntegrationError, match=facts("_update_actor", "rows", "batch")):
        other(compose(dynamic, "+algorithm.verl_ext.share_prompts=True"), Workers(""))


def test_verl_takes_the_configuration_of_the_tests_on_a_gpu():
    """They themselves run seldom."""
    from verl.utils.config import omega_conf_to_dataclass

    assert omega_conf_to_dataclass(updates.configuration("model", gpu=True).actor).use_dynamic_bsz


def test_each_layout_of_a_model(folder, record_property):
    """Gradients of an update, and the log-probabilities and entropies of a pass in the rows of their answers."""
    [found] = tasks.run("models", 1, folder)
    assert "sliding_window" in found.pop("window")["share"]
    for name, ways in found.items():
        error = {way: difference(ways[way]["gradients"], ways["all"]["gradients"]) for way in ("control", "share")}
        record_property(name, str(error))
        assert error["share"] <= 2 * error["control"] < 1e-5, name
        for kind in ("log_probs", "entropy"):
            for row, wanted in zip(ways["share"][kind], ways["all"][kind], strict=True):
                torch.testing.assert_close(row, wanted, atol=2e-6, rtol=0)


def test_the_first_pass_finds_a_wrong_mask_and_ends_all_ranks(folder):
    report = tasks.run("wrong", 2, folder)
    assert all("share_prompts" in text for text in report)


def test_a_micro_batch_is_planned_once_although_its_layers_are_computed_twice(folder):
    """And a checkpoint says nothing of this package."""
    [report] = tasks.run("plans", 1, folder)
    assert report["micro-batches"] > 1
    assert report["layers"] == 2 * 2 * report["micro-batches"]  # of a model of 2, with gradient checkpointing
    assert report["planned"] == report["seen"] == report["micro-batches"]
    assert report["config"]["model_type"] == "qwen3"
    assert "verl_ext" not in str(report["config"])
