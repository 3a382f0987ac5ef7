"""`RayPPOTrainer`: verl's own methods on trainers without workers."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo import core_algos

from tests.calls import object_array
from tests.configs import compose
from tests.facts import facts
from tests.integration.test_turns import MASKS, RIGHT, TOOL, UIDS, texts
from tests.integration.trainers.ray_runs import (
    ACCURACY,
    FORMAT,
    KEYS,
    OwnFit,
    advantages_per_row,
    data_proto,
    example_batch,
    run_own_fit,
)
from verl_ext import rubric
from verl_ext.advantages.estimator import CURRENT
from verl_ext.checks import start as starts
from verl_ext.cli import main
from verl_ext.errors import ConfigurationError, IntegrationError
from verl_ext.trainers.ray_trainer import wrap_compute_advantage

GDPO = ("algorithm.adv_estimator=gdpo", KEYS)
GRPO = "algorithm.adv_estimator=grpo"
DRGRPO = ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False")
CONTRIBUTION = "advantage/contribution/"


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        SimpleNamespace(),
        OmegaConf.create({}),
        OmegaConf.create({"algorithm": None}),
        OmegaConf.create({"algorithm": "grpo"}),
        OmegaConf.create({"algorithm": {"adv_estimator": "grpo"}}),
        OmegaConf.create([]),
    ],
    ids=repr,
)
def test_a_run_without_verl_ext_may_have_any_configuration(config: Any) -> None:
    trainer = OwnFit(config)
    assert trainer._verl_ext is None
    assert CURRENT.get() is None
    assert starts.wrap_checked(lambda given: given, config) is config


def test_the_data_of_another_trainer_is_passed_to_verls_function() -> None:
    data = object()
    assert wrap_compute_advantage(lambda given: given, data) is data


def test_a_configuration_without_verl_ext_may_have_unresolvable_interpolations() -> None:
    """They may be resolvable only in the trainer's process."""
    config = OmegaConf.create(
        {
            "reward": {"custom_reward_function": {"path": "${oc.env:ONLY_IN_THE_TRAINER}/reward.py"}},
            "algorithm": {"adv_estimator": "grpo", "filter_groups": "${nothing}"},
        }
    )
    assert starts.wrap_checked(lambda given: given, config) is config


def test_a_run_without_verl_ext_logs_no_metrics_of_verl_ext() -> None:
    algorithm = OmegaConf.create({"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True})
    [(data, metrics)] = OwnFit(SimpleNamespace(algorithm=algorithm)).fit(steps=1)
    assert data.batch["advantages"].abs().max() > 0
    assert not [name for name in metrics if name.startswith(("reward/", "advantage/"))]


def test_a_batch_without_uids_is_left_to_an_estimator_of_verl() -> None:
    """Some of verl's estimators need no groups."""
    data = example_batch()
    del data.non_tensor_batch["uid"]
    trainer = OwnFit(compose("algorithm.adv_estimator=reinforce_plus_plus", KEYS))
    assert trainer.advantages(data).batch["advantages"].abs().max() > 0


def test_the_estimator_may_be_a_member_of_verls_enum() -> None:
    config = compose(KEYS)
    config.algorithm.adv_estimator = core_algos.AdvantageEstimator.GDPO
    [(data_of_enum, _)] = OwnFit(config).fit()
    _, [(data_of_name, _)] = run_own_fit(*GDPO)
    assert advantages_per_row(data_of_enum) == advantages_per_row(data_of_name)


class ComputesOnce(OwnFit):
    """A trainer that computes advantages once, and logs metrics in two steps."""

    def fit(self) -> list[dict[str, Any]]:
        data = self.advantages()
        metrics = []
        for self.global_steps in (1, 2):
            metrics.append(self.logged(data))
        return metrics


def test_the_metrics_of_a_step_are_not_logged_in_the_next() -> None:
    first, second = ComputesOnce(compose(GRPO, KEYS)).fit()
    assert "reward/acc/mean" in first
    of_verl_ext = {name for name in first if name.startswith(("reward/", CONTRIBUTION))}
    assert first.keys() - second.keys() == of_verl_ext


class LogsTwice(OwnFit):
    """A trainer that logs the metrics of the whole batch and of a part of it.

    From the step `own_from` on, it computes its own advantages.
    """

    own_from = 99

    def fit(self, steps: int = 3) -> list[list[dict[str, Any]]]:
        metrics = []
        for self.global_steps in range(1, steps + 1):
            data = example_batch() if self.global_steps >= self.own_from else self.advantages()
            data.batch["advantages"] = data.batch["returns"] = data.batch["token_level_rewards"]
            part = data.select_idxs([0, 1])
            metrics.append([self.logged(data), self.logged(part)])
        return metrics


@pytest.mark.parametrize("name", ["hadw", "grpo"])
def test_each_dictionary_of_a_step_gets_the_metrics_of_its_batch(name: str) -> None:
    config = compose(f"algorithm.adv_estimator={name}", KEYS, "+algorithm.rewards.accuracy_key=acc")
    for step, (of_batch, of_part) in enumerate(LogsTwice(config).fit(), 1):
        of_verl_ext = {metric: value for metric, value in of_batch.items() if metric.startswith(("hadw/", "reward/"))}
        assert of_verl_ext["reward/acc/mean"] == np.mean(ACCURACY)
        if name == "hadw":
            assert of_verl_ext["hadw/updates"] == step
        assert of_verl_ext.items() <= of_part.items()


@pytest.mark.parametrize("name", ["gdpo", "grpo"])
def test_a_second_batch_of_a_step_has_its_own_metrics(name: str) -> None:
    trainer = OwnFit(compose(f"algorithm.adv_estimator={name}", KEYS))
    trainer.fit()
    data = example_batch()
    data.non_tensor_batch["acc"] = np.ones(8)
    [(_, metrics)] = trainer.fit(data=data)
    assert metrics["reward/acc/mean"] == 1.0


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_that_does_not_call_the_estimator_is_refused(step: int) -> None:
    """The steps before it logged twice."""
    trainer = LogsTwice(compose(*DRGRPO))
    trainer.own_from = step
    with pytest.raises(IntegrationError, match=facts("LogsTwice", "'drgrpo'", "not call")):
        trainer.fit()
    assert trainer.global_steps == step


@pytest.fixture
def trainer_with_many_fields() -> OwnFit:
    """Return a trainer that logs all rewards, after a batch whose reward function returned many fields."""
    trainer = OwnFit(compose(GRPO, "+algorithm.rewards.log=all"))
    data = example_batch()
    data.non_tensor_batch |= {
        "steps": object_array([1, None, 3, None, None, None, None, None]),
        "perplexity": np.array([3.0, np.inf, 1e40, np.nan, 3.0, 3.0, 3.0, 3.0]),
        "note": object_array(["good"] * 8),
        "of the data set": np.ones(8),
        "data_source": object_array(["a"] * 4 + ["b"] * 4),
    }
    data.meta_info["reward_extra_keys"] = ["acc", "format", "steps", "perplexity", "note"]
    trainer.advantages(data)
    return trainer


def test_all_numbers_of_the_reward_function_are_logged(trainer_with_many_fields: OwnFit) -> None:
    metrics: dict[str, Any] = {}
    trainer_with_many_fields._verl_ext.add_metrics_of_step(metrics)
    assert {name.split("/")[1] for name in metrics} == {"acc", "format", "steps", "perplexity"}
    assert metrics["reward/steps/mean"] == 2.0
    assert metrics["reward/steps/unscored"] == 6.0
    # A value that is not finite in float32 is not scored.
    assert metrics["reward/perplexity/max"] == 3.0
    assert metrics["reward/perplexity/unscored"] == 3.0


def test_a_metric_that_verl_has_logged_is_not_replaced(trainer_with_many_fields: OwnFit) -> None:
    for _ in range(2):  # the second time as for a part of the batch
        metrics = {"reward/acc/mean": "verl's"}
        trainer_with_many_fields._verl_ext.add_metrics_of_step(metrics)
        assert metrics["reward/acc/mean"] == "verl's"
        assert metrics["reward/steps/mean"] == 2.0


def test_excluded_responses_are_in_no_curve() -> None:
    scores = np.add(ACCURACY, FORMAT)
    data = example_batch()
    data.batch["response_mask"][0] = 0  # the first response is rejected
    data.non_tensor_batch["score"] = scores
    data.meta_info["reward_extra_keys"] = ["acc", "format", "score"]
    rewards = "+algorithm.rewards={keys:[acc],rejected:exclude}"
    [(_, metrics)] = OwnFit(compose(*DRGRPO, rewards)).fit(data=data)
    assert metrics["reward/acc/mean"] == pytest.approx(np.mean(ACCURACY[1:]))
    assert metrics["reward/format/mean"] == pytest.approx(np.mean(FORMAT[1:]))
    assert metrics["reward/score/mean"] == pytest.approx(np.mean(scores[1:]))


def test_a_batch_without_rejected_responses_counts_none() -> None:
    _, [(_, metrics)] = run_own_fit(*GDPO)
    assert metrics["advantage/rejected_responses"] == 0


def logged_contributions(*overrides: str) -> set[str]:
    """Return the rewards whose contributions a run with two keys logs."""
    _, [(_, metrics)] = run_own_fit(KEYS, *overrides)
    return {name.removeprefix(CONTRIBUTION) for name in metrics if name.startswith(CONTRIBUTION)}


def test_contributions_to_verls_grpo_are_logged() -> None:
    assert {"acc", "format"} <= logged_contributions(GRPO)


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.adv_estimator=rloo", "+algorithm.rewards.log=all"),
        (GRPO, "+algorithm.rewards.log=none"),
        (GRPO, "algorithm.use_kl_in_reward=True"),
    ],
    ids=["another estimator", "no log", "a KL term"],
)
def test_other_runs_of_verls_estimators_log_no_contributions(overrides: tuple[str, ...]) -> None:
    assert logged_contributions(*overrides) == set()


@pytest.mark.parametrize("with_kl", [False, True])
def test_the_rest_has_a_contribution_only_with_a_kl_term(with_kl: bool) -> None:
    contributions = logged_contributions(*DRGRPO, f"algorithm.use_kl_in_reward={with_kl}")
    assert ("rest" in contributions) == with_kl


def test_an_invalid_dump_dir_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        OwnFit(compose(*GDPO, f"+algorithm.verl_ext.dump_dir={tmp_path}/file/dump"))


class Resamples(OwnFit):
    """A trainer whose `compute_advantage` returns other rows, as verl's `use_pf_ppo` does."""

    def advantages_of_rows(self, rows: list[int] | None) -> None:
        """Compute advantages and return rows of the batch. None is the batch itself."""
        data = example_batch()
        data.batch["advantages"] = data.batch["token_level_rewards"]

        def compute(data: DataProto) -> DataProto:
            return data if rows is None else data.select_idxs(rows)

        wrap_compute_advantage(compute, data)


@pytest.mark.parametrize(("rows", "files"), [([7, 6, 5, 4, 3, 2, 1, 0], 0), (None, 1)], ids=["resampled", "unchanged"])
def test_rows_that_verl_resamples_are_not_dumped(tmp_path: Path, rows: list[int] | None, files: int) -> None:
    """The rewards are those of the rows before."""
    trainer = Resamples(compose(GRPO, KEYS, f"+algorithm.verl_ext.dump_dir={tmp_path}"))
    trainer.advantages_of_rows(rows)
    assert len(list(tmp_path.glob("from-0-0/*.parquet"))) == files


TOKEN_SCORES = "+algorithm.rewards.token_scores=True"


def test_token_scores_are_on_the_last_response_token_even_if_masked() -> None:
    """verl's own scores are there, too. The last tokens may be a tool's."""
    data = example_batch()
    data.batch["response_mask"][0, 2:] = 0  # a tool wrote the last 2 of 4 tokens
    # The second row has no response.
    data.batch["response_mask"][1] = 0
    data.batch["attention_mask"][1, 2:] = 0
    computed = OwnFit(compose(*GDPO, TOKEN_SCORES)).advantages(data)
    token_scores = computed.batch["token_level_scores_format"]
    assert token_scores[0].tolist() == [0, 0, 0, 1, 0]
    assert token_scores[1].tolist() == [0, 0, 0, 0, 0]
    assert token_scores[6].tolist() == [0, 0, 0, 0, 1]


def batch_with_unscored_format() -> DataProto:
    """Return a batch whose first response has no format. A token score of 0 would count as a format of 0."""
    data = example_batch()
    data.non_tensor_batch["format"] = object_array([np.nan, *FORMAT[1:]])
    return data


def test_token_scores_exist_when_advantages_are_computed() -> None:
    """Code that was written for the fork of verl reads these fields."""
    data = batch_with_unscored_format()
    original = core_algos.get_adv_estimator_fn("gdpo")
    fields: set[str] = set()

    def record_fields(*args: Any, **kwargs: Any) -> Any:
        fields.update(data.batch.keys())
        return original(*args, **kwargs)

    trainer = OwnFit(compose(*GDPO, TOKEN_SCORES))
    with mock.patch.object(core_algos, "get_adv_estimator_fn", return_value=record_fields):
        trainer.advantages(data)
    assert {"token_level_scores_acc", "token_level_scores_format"} <= fields


def test_token_scores_change_no_advantage() -> None:
    with_token_scores = OwnFit(compose(*GDPO, TOKEN_SCORES)).advantages(batch_with_unscored_format())
    without = OwnFit(compose(*GDPO)).advantages(batch_with_unscored_format())
    assert "token_level_scores_acc" not in without.batch.keys()  # noqa: SIM118 - a TensorDict has no `in`
    torch.testing.assert_close(with_token_scores.batch["advantages"], without.batch["advantages"], atol=0, rtol=0)


def test_a_batch_without_uids_is_rejected_by_verl_exts_estimators() -> None:
    data = example_batch()
    del data.non_tensor_batch["uid"]
    with pytest.raises(IntegrationError, match=facts("'gdpo'", "uid")):
        OwnFit(compose(*GDPO)).advantages(data)


def test_a_field_that_the_batch_lacks_is_named() -> None:
    steps = "+algorithm.compose.steps=[weighted_sum,tests.integration.custom_steps:BySource,center]"
    with pytest.raises(ConfigurationError, match=facts("'data_source'", "'acc', 'format'")):
        run_own_fit("algorithm.adv_estimator=compose", "+algorithm.rewards.keys=[acc]", steps)


class RemoteColumns(dict[str, Any]):
    """Columns in another process, as NeoProto's. Only the columns that are read are sent."""

    def __init__(self, columns: Any) -> None:
        super().__init__(columns)
        self.sent: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.sent.add(name)
        return super().__getitem__(name)

    def items(self) -> Any:
        raise AssertionError("all columns are sent")


class RemoteBatch(SimpleNamespace):
    """A batch with such columns. Unlike a SimpleNamespace, it may have weak references."""


@pytest.mark.parametrize(
    ("estimator", "columns_of_estimator"),
    [("gdpo", set()), ("grpo", {"token_level_scores"})],  # the contributions are to the score of verl's grpo
)
def test_only_the_columns_that_are_needed_are_read(estimator: str, columns_of_estimator: set[str]) -> None:
    data = example_batch()
    columns = RemoteColumns({name: data.batch[name] for name in list(data.batch.keys())})
    remote = RemoteBatch(batch=columns, non_tensor_batch=data.non_tensor_batch, meta_info={})
    OwnFit(compose(f"algorithm.adv_estimator={estimator}", KEYS)).advantages(remote)
    assert columns.sent == {"token_level_rewards", "response_mask"} | columns_of_estimator


def test_metrics_and_dump_have_the_conditioned_rewards(tmp_path: Path) -> None:
    """Only correct responses receive a format reward, [1000 | 1010]. Without the condition it is [1100 | 1011]."""
    condition = "+algorithm.rewards.conditions={format: {reward: acc, at_least: 1}}"
    _, [(data, metrics)] = run_own_fit(*GDPO, condition, f"+algorithm.verl_ext.dump_dir={tmp_path}")
    assert metrics["reward/format/mean"] == 3 / 8
    assert metrics["reward/format/raw_mean"] == 5 / 8
    table = pq.read_table(tmp_path / "from-0-0/advantages-00000000-000.parquet").to_pydict()
    assert table["reward/format"] == [1, 0, 0, 0, 1, 0, 1, 0]
    assert table["raw/format"] == FORMAT
    assert table["total"] == [2, 0, 0, 0, 2, 1, 2, 0]
    assert table["advantage"] == pytest.approx(advantages_per_row(data), abs=1e-6)


class TrainsOn(OwnFit):
    """A trainer that trains on the same batch in each step."""

    def fit_batch(self, fields: dict[str, Any], steps: int, mask: torch.Tensor | None = None) -> dict[str, Any]:
        """Compute and log steps with a batch of two prompts, whose score is `right`. Return the last metrics.

        `fields` are the rewards that the reward function returns.
        """
        for self.global_steps in range(1, steps + 1):
            data = data_proto(UIDS, [5] * 4, RIGHT, fields)
            if mask is not None:
                data.batch["response_mask"] = mask.clone()
            data.meta_info["reward_extra_keys"] = list(fields)
            self.computed = self.advantages(data)
            metrics = self.logged(data)
        return metrics


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `compare` on the dump, asserts its exit status and returns its output."""

    def run(*variants: str, status: int = 0) -> str:
        output = ["--output", str(tmp_path / "out.parquet")]
        assert main(["compare", str(tmp_path / "dump"), *variants, *output]) == status
        return "".join(capsys.readouterr())

    return run


RUBRICS = [rubric([1, 0, 0], [5, 3, -8]), rubric([1, 1, 1], [5, 3, -8]), rubric([1]), rubric([0])]
"""A prompt with three criteria, and a prompt with one.

The value of a rubric is its weighted sum, divided by the sum of the absolute weights: 5/16, 0/16, 1/1 and 0/1.
"""


@pytest.fixture
def metrics_of_rubrics(tmp_path: Path) -> dict[str, Any]:
    """Train two steps with a rubric and a dump. Return the metrics of the second step."""
    rewards = "+algorithm.rewards={keys:[right,rubric],weights:[1,2],rubrics:[rubric],accuracy_key:right}"
    trainer = TrainsOn(
        compose("algorithm.adv_estimator=gdpo", rewards, f"+algorithm.verl_ext.dump_dir={tmp_path}/dump")
    )
    return trainer.fit_batch({"right": object_array(RIGHT), "rubric": np.array(RUBRICS)}, steps=2)


def test_a_rubric_is_logged_without_a_warning(
    metrics_of_rubrics: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert metrics_of_rubrics["reward/rubric/mean"] == (5 / 16 + 0 + 1 + 0) / 4
    assert metrics_of_rubrics["reward/rubric/criteria"] == 2
    assert not [record for record in caplog.get_records("setup") if record.levelname == "WARNING"]


@pytest.mark.usefixtures("metrics_of_rubrics")
def test_a_dump_keeps_the_text_of_a_rubric(tmp_path: Path) -> None:
    table = pandas.read_parquet(tmp_path / "dump/from-0-0/advantages-00000002-000.parquet")
    assert table["reward/rubric"].tolist() == RUBRICS
    assert table["group_mean/rubric"].tolist() == [5 / 32] * 2 + [0.5] * 2
    # right + 2 * rubric
    assert table["total"].tolist() == [1 + 2 * 5 / 16, 0, 2, 1]


@pytest.mark.usefixtures("metrics_of_rubrics")
def test_compare_computes_the_advantages_of_a_dumped_rubric(tmp_path: Path, compare: Callable[..., str]) -> None:
    output = compare("gdpo", "gdpo algorithm.gdpo.whiten=none")
    assert "equal those that the run recorded" in output
    assert pandas.read_parquet(tmp_path / "out.parquet")["reward/rubric"].tolist() == [5 / 16, 0, 1, 0] * 2


def train_on_turns(name: str, folder: Path) -> torch.Tensor:
    """Train for three steps on the responses of `test_turns`, with a dump. Return the advantages.

    Only the first five tokens of each response are trained on, so that the third response has two turns.
    """
    overrides = [
        f"algorithm.adv_estimator={name}",
        "+algorithm.rewards={keys:[right,tool],per_turn:[tool],turn_discount:0.5,accuracy_key:right}",
        f"+algorithm.verl_ext.dump_dir={folder}/dump",
    ]
    if name == "drgrpo":
        overrides.append("+algorithm.drgrpo.check_loss=False")
    trainer = TrainsOn(compose(*overrides))
    tool = texts([TOOL[0], TOOL[1], TOOL[2][:2], TOOL[3]])
    mask = torch.tensor(MASKS)[:, :5]
    trainer.fit_batch({"right": object_array(RIGHT), "tool": np.array(tool)}, steps=3, mask=mask)
    return trainer.computed.batch["advantages"]


each_estimator_of_turns = pytest.mark.parametrize("name", ["drgrpo", "hadw", "dgpo"])


@each_estimator_of_turns
def test_a_dump_has_a_row_per_turn(name: str, tmp_path: Path) -> None:
    advantages = train_on_turns(name, tmp_path)
    table = pandas.read_parquet(tmp_path / "dump/from-0-0/advantages-00000003-000.parquet")
    assert table["uid"].tolist() == ["p", "p", "p", "q", "q", "q"]
    assert table["turn"].tolist() == [1, 2, 1, 1, 2, 1]
    assert table["raw/tool"].tolist() == [1, 0, 1, 0, 1, 0]
    assert table["reward/tool"].tolist() == [1, 0, 1, 0.5, 1, 0]
    assert table["reward/right"].tolist() == [0.5, 1, 0, 0, 0, 1]
    assert table["tokens"].tolist() == [2, 1, 3, 1, 2, 1]
    first_turn, second_turn = advantages[0, 0].item(), advantages[0, 3].item()
    assert table["advantage"].tolist()[:2] == pytest.approx([first_turn, second_turn], abs=1e-6)


@each_estimator_of_turns
def test_compare_computes_the_advantages_of_dumped_turns(
    name: str, tmp_path: Path, compare: Callable[..., str]
) -> None:
    train_on_turns(name, tmp_path)
    output = compare(name, "gdpo algorithm.gdpo.whiten=none")
    assert "equal those that the run recorded" in output
    assert "18 turns of 12 trajectories" in output
    assert pandas.read_parquet(tmp_path / "out.parquet")["turn"].tolist() == [1, 2, 1, 1, 2, 1] * 3


@each_estimator_of_turns
def test_compare_rejects_another_choice_of_per_turn_rewards(
    name: str, tmp_path: Path, compare: Callable[..., str]
) -> None:
    train_on_turns(name, tmp_path)
    assert "per_turn" in compare(name, "algorithm.rewards.per_turn=[]", status=1)
