"""`RayPPOTrainer`: verl's own methods on instances without workers."""

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
from verl.trainer.ppo import core_algos, ray_trainer

from tests.calls import object_array
from tests.configs import compose
from tests.facts import facts
from tests.integration.test_turns import MASKS, RIGHT, TOOL, UIDS, texts
from tests.integration.trainers.ray_runs import (
    ACCURACY,
    FORMAT,
    KEYS,
    OwnFit,
    example_batch,
    data_proto,
    run_own_fit,
    advantages_per_row,
)
from verl_ext import rubric
from verl_ext.advantages.estimator import CURRENT
from verl_ext.checks import start as starts
from verl_ext.cli import main
from verl_ext.errors import ConfigurationError, IntegrationError
from verl_ext.trainers import ray_trainer as ours


def test_a_run_that_is_not_ours_passes_through_whatever_its_configuration_looks_like() -> None:
    plain = ({}, {"algorithm": None}, {"algorithm": "grpo"}, {"algorithm": {"adv_estimator": "grpo"}}, [])
    for config in (None, {}, SimpleNamespace(), *map(OmegaConf.create, plain)):
        trainer = OwnFit(config)
        assert (trainer._verl_ext, CURRENT.get()) == (None, None)
        assert starts.wrap_checked(lambda given: given, config) is config
    foreign = object()  # another trainer's data
    assert ours.wrap_compute_advantage(lambda given: given, foreign) is foreign
    unknown_here = {"reward": {"custom_reward_function": {"path": "${oc.env:ONLY_IN_THE_TRAINER}/reward.py"}}}
    unknown_here |= {"algorithm": {"adv_estimator": "grpo", "filter_groups": "${nothing}"}}
    assert starts.wrap_checked(lambda given: given, OmegaConf.create(unknown_here)) is not None
    algorithm = OmegaConf.create({"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True})
    [(data, metrics)] = OwnFit(SimpleNamespace(algorithm=algorithm)).fit(steps=1)
    assert data.batch["advantages"].abs().max() > 0
    assert not [name for name in metrics if name.startswith(("reward/", "advantage/"))]


def test_a_batch_without_uids_is_left_to_verl() -> None:
    """Some of verl's estimators need no groups."""
    data = example_batch()
    del data.non_tensor_batch["uid"]
    trainer = OwnFit(compose("algorithm.adv_estimator=reinforce_plus_plus", KEYS))
    assert trainer.advantages(data).batch["advantages"].abs().max() > 0


def test_the_estimator_may_be_a_member_of_verls_enum() -> None:
    config = compose(KEYS)
    config.algorithm.adv_estimator = core_algos.AdvantageEstimator.GDPO
    [(of_enum, _)] = OwnFit(config).fit()
    _, [(of_name, _)] = run_own_fit("algorithm.adv_estimator=gdpo", KEYS)
    assert advantages_per_row(of_enum) == advantages_per_row(of_name)


def test_metrics_of_one_step_do_not_stay_for_the_next() -> None:
    class EverySecond(OwnFit):
        def fit(self) -> list[dict[str, Any]]:
            data, metrics = self.advantages(), []
            for self.global_steps in (1, 2):
                metrics.append(ray_trainer.compute_data_metrics(data, use_critic=False))
            return metrics

    first, second = EverySecond(compose("algorithm.adv_estimator=grpo", KEYS)).fit()
    assert "reward/acc/mean" in first
    assert set(first) - set(second) == {
        name for name in first if name.startswith(("reward/", "advantage/contribution/"))
    }


class AsksTwice(OwnFit):
    """Asks for the metrics of the whole batch and of a part of it; `own_from`: the step of its own advantages."""

    own_from = 99

    def fit(self, steps: int = 3) -> list[list[dict[str, Any]]]:
        done = []
        for self.global_steps in range(1, steps + 1):
            data = example_batch() if self.global_steps >= self.own_from else self.advantages()
            data.batch["advantages"] = data.batch["returns"] = data.batch["token_level_rewards"]
            done.append([self.logged(part) for part in (data, data.select_idxs([0, 1]))])
        return done


@pytest.mark.parametrize("name", ["hadw", "grpo"])
def test_each_dictionary_of_a_step_gets_the_metrics_of_its_batch(name: str) -> None:
    steps = AsksTwice(compose(f"algorithm.adv_estimator={name}", KEYS, "+algorithm.rewards.accuracy_key=acc")).fit()
    for number, (first, second) in enumerate(steps, 1):
        ours = {metric: value for metric, value in first.items() if metric.startswith(("hadw/", "reward/"))}
        assert ours["reward/acc/mean"] == np.mean(ACCURACY)
        assert ours.get("hadw/updates", number) == number
        assert ours.items() <= second.items()


@pytest.mark.parametrize("name", ["gdpo", "grpo"])
def test_a_second_batch_of_a_step_has_the_metrics_of_its_own_rewards(name: str) -> None:
    trainer = OwnFit(compose(f"algorithm.adv_estimator={name}", KEYS))
    trainer.fit()
    data = example_batch()
    data.non_tensor_batch["acc"] = np.ones(8)
    [(_, metrics)] = trainer.fit(data=data)
    assert metrics["reward/acc/mean"] == 1.0


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_without_the_estimator_is_refused_though_the_step_before_asked_twice(step: int) -> None:
    trainer = AsksTwice(compose("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False"))
    trainer.own_from = step
    with pytest.raises(IntegrationError, match=facts("AsksTwice", "'drgrpo'", "not call")):
        trainer.fit()
    assert trainer.global_steps == step


def test_all_numbers_of_the_reward_function_are_logged_and_verl_s_metrics_stay() -> None:
    trainer = OwnFit(compose("algorithm.adv_estimator=grpo", "+algorithm.rewards.log=all"))
    data = example_batch()
    data.non_tensor_batch |= {
        "steps": np.array([1, None, 3, None, None, None, None, None], dtype=object),
        "perplexity": np.array([3.0, np.inf, 1e40, np.nan, 3.0, 3.0, 3.0, 3.0]),
        "note": np.array(["good"] * 8, dtype=object),
        "of the data set": np.ones(8),
        "data_source": np.array(["a"] * 4 + ["b"] * 4, dtype=object),
    }
    data.meta_info["reward_extra_keys"] = ["acc", "format", "steps", "perplexity", "note"]
    trainer.advantages(data)
    for _ in range(2):  # the second time as for a part of the batch
        metrics = {"reward/acc/mean": "verl's"}
        trainer._verl_ext.add_metrics_of_step(metrics)
        assert metrics["reward/acc/mean"] == "verl's"
    assert {name.split("/")[1] for name in metrics} == {"acc", "format", "steps", "perplexity"}
    assert metrics["reward/steps/mean"] == 2.0
    assert metrics["reward/steps/unscored"] == 6.0
    assert (metrics["reward/perplexity/max"], metrics["reward/perplexity/unscored"]) == (3.0, 3.0)


def test_rejected_responses_that_are_left_out_are_in_no_curve() -> None:
    data = example_batch()
    data.batch["response_mask"][0] = 0
    scores = np.add(ACCURACY, FORMAT)
    data.non_tensor_batch["score"] = scores
    data.meta_info["reward_extra_keys"] = ["acc", "format", "score"]
    left_out = ["algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False", "+algorithm.rewards.keys=[acc]"]
    trainer = OwnFit(compose(*left_out, "+algorithm.rewards.rejected=exclude"))
    [(_, metrics)] = trainer.fit(data=data)
    assert metrics["reward/acc/mean"] == pytest.approx(np.mean(ACCURACY[1:]))
    assert metrics["reward/format/mean"] == pytest.approx(np.mean(FORMAT[1:]))
    assert metrics["reward/score/mean"] == pytest.approx(np.mean(scores[1:]))


def test_a_batch_without_rejected_responses_counts_none() -> None:
    _, [(_, metrics)] = run_own_fit("algorithm.adv_estimator=gdpo", KEYS)
    assert metrics["advantage/rejected_responses"] == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.adv_estimator=rloo", "+algorithm.rewards.log=all"),
        ("algorithm.adv_estimator=grpo", "+algorithm.rewards.log=none"),
        ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=True"),
    ],
)
def test_rewards_have_contributions_only_in_a_logged_grpo_without_a_kl_term(overrides: tuple[str, ...]) -> None:
    def contributions(*given: str) -> list[str]:
        _, [(_, metrics)] = run_own_fit(KEYS, *given)
        return [name for name in metrics if name.startswith("advantage/contribution/")]

    assert contributions("algorithm.adv_estimator=grpo") != []
    assert contributions(*overrides) == []


@pytest.mark.parametrize("kl", [False, True])
def test_the_rest_beside_the_rewards_has_a_contribution_only_with_a_kl_term(kl: bool) -> None:
    drgrpo = ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False")
    _, [(_, metrics)] = run_own_fit(*drgrpo, KEYS, f"algorithm.use_kl_in_reward={kl}")
    assert ("advantage/contribution/rest" in metrics) == kl


def test_a_dump_dir_that_cannot_be_made_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        OwnFit(compose("algorithm.adv_estimator=gdpo", KEYS, f"+algorithm.verl_ext.dump_dir={tmp_path}/file/dump"))


def test_rows_that_verl_draws_anew_are_not_dumped(tmp_path: Path) -> None:
    """As `use_pf_ppo` does: the rewards are those of the rows before."""

    class Draws(OwnFit):
        def draw(self, rows: list[int] | None) -> None:
            data = example_batch()
            data.batch["advantages"] = data.batch["token_level_rewards"]
            ours.wrap_compute_advantage(lambda data: data if rows is None else data.select_idxs(rows), data)

    trainer = Draws(compose("algorithm.adv_estimator=grpo", KEYS, f"+algorithm.verl_ext.dump_dir={tmp_path}"))
    for rows, files in (([7, 6, 5, 4, 3, 2, 1, 0], 0), (None, 1)):
        trainer.draw(rows)
        assert len(list(tmp_path.glob("from-0-0/*.parquet"))) == files


def test_token_scores_stand_on_the_last_token_of_the_response_even_if_it_is_not_trained_on() -> None:
    """As verl's own scores do: the answer of a tool may be the last; a row without any response has no place."""

    class WithTool(OwnFit):
        def fit(self) -> DataProto:
            data = example_batch()
            data.batch["response_mask"][0, 2:] = 0  # a response of 4 tokens, of which the tool wrote 2
            data.batch["response_mask"][1] = data.batch["attention_mask"][1, 2:] = 0
            return self.advantages(data)

    config = compose("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.rewards.token_scores=True")
    field = WithTool(config).fit().batch["token_level_scores_format"]
    assert field[0].tolist() == [0, 0, 0, 1, 0]
    assert field[1].tolist() == [0, 0, 0, 0, 0]
    assert field[6].tolist() == [0, 0, 0, 0, 1]


def test_token_scores_are_there_when_advantages_are_computed_and_do_not_become_the_components() -> None:
    """Code written against the fork reads the fields there; NaN, "not scored", would read as 0 from them."""
    seen: list[set[str]] = []

    class Looks(OwnFit):
        def fit(self) -> DataProto:
            data = example_batch()
            data.non_tensor_batch["format"] = np.array([np.nan, *FORMAT[1:]], dtype=object)

            def look(*args: Any, **kwargs: Any) -> Any:
                seen.append({name for name, _ in data.batch.items() if name.startswith("token_level_scores_")})
                return original(*args, **kwargs)

            original = core_algos.get_adv_estimator_fn("gdpo")
            with mock.patch.object(core_algos, "get_adv_estimator_fn", return_value=look):
                return self.advantages(data)

    with_fields = Looks(compose("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.rewards.token_scores=True")).fit()
    without = Looks(compose("algorithm.adv_estimator=gdpo", KEYS)).fit()
    assert seen == [{"token_level_scores_acc", "token_level_scores_format"}, set()]
    torch.testing.assert_close(with_fields.batch["advantages"], without.batch["advantages"], atol=0, rtol=0)


def test_a_batch_without_uids_is_rejected_if_verl_ext_computes_the_advantages() -> None:
    data = example_batch()
    del data.non_tensor_batch["uid"]
    with pytest.raises(IntegrationError, match=facts("'gdpo'", "uid")):
        OwnFit(compose("algorithm.adv_estimator=gdpo", KEYS)).advantages(data)


def test_a_field_that_the_batch_lacks_is_named() -> None:
    steps = "+algorithm.compose.steps=[weighted_sum,tests.integration.custom_steps:BySource,center]"
    with pytest.raises(ConfigurationError, match=facts("'data_source'", "'acc', 'format'")):
        run_own_fit("algorithm.adv_estimator=compose", "+algorithm.rewards.keys=[acc]", steps)


class Lazy(dict[str, Any]):
    """A batch whose columns live in another process, of which only those that are read are sent; as NeoProto's."""

    def __init__(self, columns: Any) -> None:
        super().__init__(columns)
        self.sent: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.sent.add(name)
        return super().__getitem__(name)

    def items(self) -> Any:
        raise AssertionError("all columns are sent")


class Elsewhere(SimpleNamespace):
    """Such a batch; a SimpleNamespace itself has no weak references."""


@pytest.mark.parametrize("estimator", ["gdpo", "grpo"])
def test_only_the_columns_that_are_needed_are_read(estimator: str) -> None:
    data = example_batch()
    columns = Lazy({name: data.batch[name] for name in list(data.batch.keys())})
    lazy = Elsewhere(batch=columns, non_tensor_batch=data.non_tensor_batch, meta_info={})
    OwnFit(compose(f"algorithm.adv_estimator={estimator}", KEYS)).advantages(lazy)
    score = ["token_level_scores"] * (estimator == "grpo")  # of which the keys have their shares
    assert columns.sent == {"token_level_rewards", "response_mask", *score}


CONDITION = "+algorithm.rewards.conditions={format: {reward: acc, at_least: 1}}"


def test_metrics_and_dump_show_what_the_estimator_saw(tmp_path: Path) -> None:
    """Only right answers have a format: [1000 | 1010]; the raw one is [1100 | 1011]."""
    _, [(data, metrics)] = run_own_fit(
        "algorithm.adv_estimator=gdpo", KEYS, CONDITION, f"+algorithm.verl_ext.dump_dir={tmp_path}"
    )
    assert metrics["reward/format/mean"] == 3 / 8
    assert metrics["reward/format/raw_mean"] == 5 / 8
    table = pq.read_table(tmp_path / "from-0-0/advantages-00000000-000.parquet").to_pydict()
    assert table["reward/format"] == [1, 0, 0, 0, 1, 0, 1, 0]
    assert table["raw/format"] == FORMAT
    assert table["total"] == [2, 0, 0, 0, 2, 1, 2, 0]
    assert table["advantage"] == pytest.approx(advantages_per_row(data), abs=1e-6)


class Sessions(OwnFit):
    """Batches of the responses above, the first five tokens of each."""

    def fit(self, steps: int) -> list[torch.Tensor]:
        found = []
        for self.global_steps in range(1, steps + 1):
            tool = np.array(texts([TOOL[0], TOOL[1], TOOL[2][:2], TOOL[3]]))
            data = data_proto(UIDS, [5] * 4, RIGHT, {"right": object_array(RIGHT), "tool": tool})
            data.batch["response_mask"] = torch.tensor(MASKS)[:, :5]
            data.meta_info["reward_extra_keys"] = ["right", "tool"]
            found.append(self.advantages(data).batch["advantages"])
            ray_trainer.compute_data_metrics(data, use_critic=False)
        return found


class Rubrics(OwnFit):
    """Batches of two prompts, one with three criteria and one with one."""

    def fit(self, steps: int) -> tuple[list[str], dict[str, Any]]:
        texts = [rubric(values, [5, 3, -8]) for values in ([1, 0, 0], [1, 1, 1])] + [rubric([x]) for x in (1, 0)]
        for self.global_steps in range(1, steps + 1):
            data = data_proto(UIDS, [5] * 4, RIGHT, {"right": object_array(RIGHT), "rubric": np.array(texts)})
            data.meta_info["reward_extra_keys"] = ["right", "rubric"]
            self.advantages(data)
            metrics = ray_trainer.compute_data_metrics(data, use_critic=False)
        return texts, metrics


def test_a_dump_keeps_the_text_of_a_rubric_and_compare_computes_the_same_from_it(tmp_path, capsys, caplog):
    trainer = Rubrics(
        compose(
            "algorithm.adv_estimator=gdpo",
            "+algorithm.rewards={keys:[right,rubric],weights:[1,2],rubrics:[rubric],accuracy_key:right}",
            f"+algorithm.verl_ext.dump_dir={tmp_path}/dump",
        )
    )
    texts, metrics = trainer.fit(2)
    assert metrics["reward/rubric/mean"] == (5 / 16 + 0 + 1 + 0) / 4
    assert metrics["reward/rubric/criteria"] == 2
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    table = pandas.read_parquet(tmp_path / "dump/from-0-0/advantages-00000002-000.parquet")
    assert table["reward/rubric"].tolist() == texts
    assert table["group_mean/rubric"].tolist() == [5 / 32] * 2 + [0.5] * 2
    assert table["total"].tolist() == [1 + 2 * 5 / 16, 0, 2, 1]
    given = [str(tmp_path / "dump"), "gdpo", "gdpo algorithm.gdpo.whiten=none"]
    assert main(["compare", *given, "--output", str(tmp_path / "out.parquet")]) == 0
    assert "equal those that the run recorded" in capsys.readouterr().out
    assert pandas.read_parquet(tmp_path / "out.parquet")["reward/rubric"].tolist() == [5 / 16, 0, 1, 0] * 2


@pytest.mark.parametrize("name", ["drgrpo", "hadw", "dgpo"])
def test_a_dump_has_a_row_a_turn_and_compare_computes_the_same_from_it(name, tmp_path, capsys):
    trainer = Sessions(
        compose(
            f"algorithm.adv_estimator={name}",
            "+algorithm.rewards={keys:[right,tool],per_turn:[tool],turn_discount:0.5,accuracy_key:right}",
            f"+algorithm.verl_ext.dump_dir={tmp_path}/dump",
            *(["+algorithm.drgrpo.check_loss=False"] if name == "drgrpo" else []),
        )
    )
    tensors = trainer.fit(3)
    table = pandas.read_parquet(tmp_path / "dump/from-0-0/advantages-00000003-000.parquet")
    assert table["uid"].tolist() == ["p", "p", "p", "q", "q", "q"]
    assert table["turn"].tolist() == [1, 2, 1, 1, 2, 1]
    assert table["raw/tool"].tolist() == [1, 0, 1, 0, 1, 0]
    assert table["reward/tool"].tolist() == [1, 0, 1, 0.5, 1, 0]
    assert table["reward/right"].tolist() == [0.5, 1, 0, 0, 0, 1]
    assert table["tokens"].tolist() == [2, 1, 3, 1, 2, 1]
    first = tensors[2][0]
    assert table["advantage"].tolist()[:2] == pytest.approx([first[0].item(), first[3].item()], abs=1e-6)
    given = [str(tmp_path / "dump"), name, "gdpo algorithm.gdpo.whiten=none", "--output", str(tmp_path / "out.parquet")]
    assert main(["compare", *given]) == 0
    out = capsys.readouterr().out
    assert "equal those that the run recorded" in out
    assert "18 turns of 12 trajectories" in out
    assert pandas.read_parquet(tmp_path / "out.parquet")["turn"].tolist() == table["turn"].tolist() * 3
    assert main(["compare", *given[:2], "algorithm.rewards.per_turn=[]"]) == 1
    assert "per_turn" in "".join(capsys.readouterr())
