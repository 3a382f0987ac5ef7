"""The trainer marks the data of each pass, prepares the workers before the first one, and rejects what cannot work."""

from types import SimpleNamespace

import pytest

from tests.configs import compose
from tests.facts import facts
from verl_ext import hooks, update
from verl_ext.errors import IntegrationError
from verl_ext.trainers.mixin import TrainerMixin, with_mixin
from verl_ext.update import SHARE_MARK, SKIP_MARK, engine, order

DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz=True"
UNRELATED = "+algorithm.rewards.keys=[acc]"


class FakeWorkers:
    """A group of workers: the problem of each rank, or an empty text."""

    def __init__(self, *problems):
        self.problems = problems
        self.times_prepared = 0

    def execute_all_sync(self, method, function):
        assert method == "execute_func_rank_zero"
        assert function is update.install_engine
        self.times_prepared += 1
        return list(self.problems)


class FakeTrainer:
    """verl's trainer: it records the data of each of its passes."""

    def __init__(self, config, workers, ref_workers=None):
        self.actor_rollout_wg = workers
        self.ref_policy_wg = ref_workers
        self.passes = []

    def _balance_batch(self, batch, metrics):
        """Return another batch, as `PPOTrainer` does."""
        return SimpleNamespace(balanced=batch)

    def _compute_old_log_prob(self, batch):
        [entries] = vars(batch).values()
        self.passes.append(dict(entries))

    _compute_ref_log_prob = _compute_old_log_prob
    _update_actor = _compute_old_log_prob


Trainer = with_mixin(TrainerMixin, FakeTrainer)


def configuration(*settings):
    """Return a configuration in which these settings of verl_ext are True."""
    overrides = [f"+algorithm.verl_ext.{setting}=True" for setting in settings]
    return compose(DYNAMIC, *overrides)


def batch_with(name, entries):
    """Return a batch of the default trainer (`extra_info`) or of `RayPPOTrainer` (`meta_info`)."""
    return SimpleNamespace(**{name: entries})


@pytest.mark.parametrize(
    ("settings", "marks"),
    [
        ((), {}),
        (("skip_zero_advantage",), {SKIP_MARK: True}),
        (("share_prompts", "skip_zero_advantage"), {SKIP_MARK: True, SHARE_MARK: True}),
    ],
    ids=["none", "skip", "both"],
)
@pytest.mark.parametrize("name", ["extra_info", "meta_info"])
@pytest.mark.parametrize("method", ["_compute_old_log_prob", "_compute_ref_log_prob", "_update_actor"])
def test_data_is_marked_during_a_pass_only(settings, marks, name, method):
    workers = FakeWorkers("", "")
    trainer = Trainer(configuration(*settings), workers)
    entries = {"temperature": 1.0}
    for _ in range(2):
        getattr(trainer, method)(batch_with(name, entries))
        assert entries == {"temperature": 1.0}
    assert trainer.passes == [{"temperature": 1.0, **marks}] * 2
    assert workers.times_prepared == (1 if marks else 0)


def test_failing_pass_leaves_no_marks():
    class FailingTrainer(FakeTrainer):
        def _update_actor(self, batch):
            raise ValueError("out of memory")

    trainer = with_mixin(TrainerMixin, FailingTrainer)(configuration("skip_zero_advantage"), FakeWorkers(""))
    entries = {"temperature": 1.0}
    with pytest.raises(ValueError, match="memory"):
        trainer._update_actor(batch_with("extra_info", entries))
    assert entries == {"temperature": 1.0}


@pytest.mark.parametrize("name", ["actor_rollout_wg", "ref_policy_wg"])
def test_rank_without_verl_ext_is_named_before_the_first_pass(name):
    groups = {"actor_rollout_wg": FakeWorkers("", ""), "ref_policy_wg": FakeWorkers("", "")}
    groups[name] = FakeWorkers("", "no such module")
    trainer = Trainer(configuration("share_prompts"), groups["actor_rollout_wg"], groups["ref_policy_wg"])
    with pytest.raises(IntegrationError, match=facts("[1]", name, "no such module")):
        trainer._update_actor(batch_with("meta_info", {}))
    assert trainer.passes == []


@pytest.mark.parametrize(
    ("settings", "is_reordered"),
    [((), False), (("skip_zero_advantage",), False), (("share_prompts",), True)],
    ids=["none", "skip", "share"],
)
class TestOrderOfRows:
    """Rows are reordered after verl has balanced them, only to share prompts."""

    @pytest.fixture
    def reordered(self, monkeypatch):
        """Return the calls of `reorder`."""
        calls = []
        monkeypatch.setattr(order, "reorder", lambda *arguments: calls.append(arguments))
        return calls

    def test_trainer_that_returns_a_new_batch(self, settings, is_reordered, reordered):
        batch, metrics = SimpleNamespace(), {}
        trainer = Trainer(configuration(*settings), FakeWorkers(""))
        balanced = trainer._balance_batch(batch, metrics)
        assert balanced.balanced is batch
        assert reordered == ([(trainer, balanced, metrics)] if is_reordered else [])

    def test_trainer_that_balances_in_place(self, settings, is_reordered, reordered):
        class BalancesInPlace(FakeTrainer):
            """As `RayPPOTrainer`, which returns nothing."""

            def _balance_batch(self, batch, metrics): ...

        batch, metrics = SimpleNamespace(), {}
        trainer = with_mixin(TrainerMixin, BalancesInPlace)(configuration(*settings), FakeWorkers(""))
        assert trainer._balance_batch(batch, metrics) is None
        assert reordered == ([(trainer, batch, metrics)] if is_reordered else [])


@pytest.mark.parametrize("setting", ["skip_zero_advantage", "share_prompts"])
def test_subclass_that_bypasses_the_marks_is_rejected(setting):
    class Bypasses(Trainer):
        def _update_actor(self, batch): ...

    Bypasses(compose(UNRELATED), FakeWorkers(""))  # accepted without the setting
    with pytest.raises(IntegrationError, match=facts("Bypasses._update_actor", "super()._update_actor")):
        Bypasses(configuration(setting), FakeWorkers(""))


def test_engine_that_cannot_read_the_marks_is_rejected_at_start(monkeypatch):
    def fail():
        raise IntegrationError("no such function")

    monkeypatch.setattr(engine, "install", fail)
    with pytest.raises(IntegrationError, match=facts("no such function", "algorithm.verl_ext.share_prompts=False")):
        Trainer(configuration("share_prompts"), FakeWorkers(""))


class ChangedTrainer(FakeTrainer):
    """A trainer of a verl whose update has another parameter."""

    __module__ = hooks.TRAINERS[True]

    def _balance_batch(self, batch, metrics): ...

    def _compute_old_log_prob(self, batch): ...

    def _compute_ref_log_prob(self, batch): ...

    def _update_actor(self, rows): ...


def test_trainer_of_verl_with_another_parameter_is_rejected():
    trainer_class = with_mixin(TrainerMixin, ChangedTrainer)
    trainer_class(compose(DYNAMIC, UNRELATED), FakeWorkers(""))  # accepted without the setting
    with pytest.raises(IntegrationError, match=facts("_update_actor", "rows", "batch")):
        trainer_class(configuration("share_prompts"), FakeWorkers(""))
