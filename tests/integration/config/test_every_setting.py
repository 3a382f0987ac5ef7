"""Each setting, moved away from its default, changes something or is refused or warned of: none is silently idle.

The settings are read from the dataclasses, so that a new one fails here until it has an effect. A switch, a number and
a choice are moved by themselves; another setting, and one that only some values show, stands in a table here.

What a run shows is all that its legacy trainer leaves of a few updates: advantages, metrics, fields of the batch,
files, and the checks.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import typing
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from tests.integration.configs import compose
from tests.integration.trainers.legacy_runs import data_of
from verl_ext.core.typed import number
from verl_ext.errors import ConfigurationError, VerlExtError
from verl_ext.estimators.compose import STEPS
from verl_ext.integration.guards import guard
from verl_ext.integration.trainers import attach, v1
from verl_ext.registry import BUILT_IN
from verl_ext.settings import sections

SECTIONS = sections()


def others(kind: type[Any], item: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """Values away from the default of a switch, a choice or a floating-point number."""
    hint = typing.get_type_hints(kind)[item.name]
    if hint is bool:
        return (not item.default,)
    if typing.get_origin(hint) is typing.Literal:
        return tuple(value for value in typing.get_args(hint) if value != item.default)
    found = []
    for value in (item.default + 0.5, item.default - 0.5, item.default / 2) if hint is float else ():
        with suppress(ConfigurationError):
            number("", value, **item.metadata)
            found.append(value)
    return tuple(value for value in found if value != item.default)


def moved_away(kind: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Those values by the name of the setting, for each setting that has some."""
    found = {item.name: others(kind, item) for item in dataclasses.fields(kind)}
    return {name: values for name, values in found.items() if values}


HARD = {"on": "b", "at_least": 0.5}
# Other values than the default, of which one at least must show in every run where the setting is accepted; those named
# here are taken instead of the derived ones.
OTHER: dict[str, tuple[Any, ...]] = {
    **{f"{name}.{key}": values for name, kind in SECTIONS.items() for key, values in moved_away(kind).items()},
    "rewards.keys": (["b"], ["b", "a"], ["a", "b", "acc"]),
    "rewards.weights": ([1.0, 0.25], [1.0]),
    "rewards.accuracy_key": ("b",),
    "rewards.accuracy_threshold": (0.3,),
    "gdpo.conditions": ({"a": HARD},),
    "hadw.base": ("drgrpo", "dgpo"),
    "hadw.anchor": ("window",),
    "hadw.history_window": (2,),
    "hadw.eta": (0.5, 0.0),
    "hadw.eta_min": (0.5, 0.0),
    "hadw.fixed_anchor": (0.7,),
    "compose.steps": (["weigh_and_sum", "centre", "scale_by_std"],),
    "verl_ext.dump_dir": ("other",),
    "verl_ext.dump_every": (2,),
    "verl_ext.dump_limit_mb": (0.001,),
}
KEYS = {"rewards": {"keys": ["a", "b"]}}
LOSS = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 9, "use_kl_loss": False}
RUNS: dict[str, dict[str, Any]] = {
    **{name: {"adv_estimator": name, **KEYS} for name in sorted(set(BUILT_IN) - {"compose", "hadw"})},
    "drgrpo": {"adv_estimator": "drgrpo", "actor": LOSS},
    "drgrpo on verl's loss": {"adv_estimator": "drgrpo"},
    "gdpo by verl's names": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"]},
    "gdpo without a division": {"adv_estimator": "gdpo", **KEYS, "gdpo": {"scale": "none", "whiten": "none"}},
    "gdpo with files": {"adv_estimator": "gdpo", **KEYS, "verl_ext": {"dump_dir": "here"}},
    "dgpo without weights of difficulty": {"adv_estimator": "dgpo", **KEYS, "dgpo": {"dqw": False}},
    "hadw on grpo": {"adv_estimator": "hadw", **KEYS},
    "hadw on gdpo": {"adv_estimator": "hadw", **KEYS, "hadw": {"base": "gdpo"}},
    "hadw on dgpo": {"adv_estimator": "hadw", **KEYS, "hadw": {"base": "dgpo"}},
    "hadw on drgrpo": {"adv_estimator": "hadw", **KEYS, "hadw": {"base": "drgrpo"}, "actor": LOSS},
    "hadw by a window": {"adv_estimator": "hadw", **KEYS, "hadw": {"anchor": "window"}},
    "hadw by a fixed anchor": {"adv_estimator": "hadw", **KEYS, "hadw": {"anchor": "fixed", "fixed_anchor": 0.5}},
    "hadw without eta": {"adv_estimator": "hadw", **KEYS, "hadw": {"eta": 0.0}},
    "hadw with the largest step": {"adv_estimator": "hadw", **KEYS, "hadw": {"eta_min": 1.0}},
    "compose": {"adv_estimator": "compose", **KEYS, "compose": {"steps": ["centre", "weigh_and_sum"]}},
    "compose by difficulty": {
        "adv_estimator": "compose",
        **KEYS,
        "compose": {"steps": ["weigh_and_sum", "centre", "weigh_by_difficulty"]},
    },
}  # fmt: skip
BASE = ["weigh_and_sum", "centre", "scale_by_std"]
# Of each step: the list before it, and other values of its settings.
OF_STEPS: dict[str, tuple[list[str], list[str], dict[str, tuple[Any, ...]]]] = {
    "condition": ([], ["centre", "weigh_and_sum"], {"conditions": ({"a": HARD},)}),
    "centre": (["weigh_and_sum"], [], {}),
    "scale_by_std": (["weigh_and_sum", "centre"], [], {}),
    "scale_by_mad": (["weigh_and_sum", "centre"], [], {}),
    "weigh_and_sum": (["centre"], [], {}),
    "whiten": (BASE, [], {}),
    "balance": (BASE, [], {}),
    "weigh_by_difficulty": (BASE, [], {}),
    "weigh_by_history": (
        BASE,
        [],
        {
            "anchor": ("window",),
            "history_window": (2,),
            "fixed_anchor": (0.7,),
        },
    ),
}  # fmt: skip


def batches() -> list[DataProto]:
    """Five updates of four prompts of four responses; accuracy rises, and groups without variance are among them."""
    draw, found = np.random.default_rng(3), []
    for update in range(5):
        lengths = draw.integers(1, 6, 16)
        acc = (draw.integers(0, 3, 16) + 0.5 * update) / 4
        a, b = draw.integers(0, 3, 16) * 2.0, draw.integers(0, 5, 16) / 4
        b[4:8] = 0.25
        a[12:] = b[12:] = 1.0
        found.append(data_of(np.repeat(list("ABCD"), 4), lengths, acc, {"acc": acc, "a": a, "b": b}))
    return found


class Fits(RayPPOTrainer):
    def __init__(self, config: Any) -> None:
        self.config = config
        self.global_steps = 0

    def fit(self, given: list[DataProto]) -> list[Any]:
        seen: list[Any] = []
        attach.before_load(self)
        v1.wrap_build_replay_buffer(lambda trainer: None)(self)
        for data in given:
            self.global_steps += 1
            done = ray_trainer.compute_advantage(
                data,
                adv_estimator=self.config.algorithm.adv_estimator,
                norm_adv_by_std_in_grpo=self.config.algorithm.norm_adv_by_std_in_grpo,
                config=self.config.algorithm,
            )
            metrics = ray_trainer.compute_data_metrics(done, use_critic=False)
            tensors = {name: value.double().numpy().round(9).tolist() for name, value in done.batch.items()}
            seen.append((tensors, {name: round(float(value), 9) for name, value in metrics.items()}))
        return seen


@pytest.fixture(scope="module")
def plain() -> Any:
    """What the checks look at of verl's configuration, as plain data: the whole takes long to copy."""
    one_update = ("data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=256")
    whole = OmegaConf.to_container(
        compose(*one_update, "data.max_response_length=9", "trainer.save_freq=1"), resolve=True
    )
    actor = whole["actor_rollout_ref"]["actor"]
    flat = {name: value for name, value in actor.items() if not isinstance(value, dict) or name == "policy_loss"}
    return {name: whole[name] for name in ("algorithm", "data", "reward", "trainer")} | {
        "actor_rollout_ref": {"actor": flat}
    }


class Shown:
    """What a run with some settings shows."""

    def __init__(self, algorithm: dict[str, Any], plain: Any, folder: Path, caplog: Any, monkeypatch: Any) -> None:
        folder.mkdir(parents=True)
        asked: list[str] = []

        def attempt(switch: str, settings: Any, *_: Any, **__: Any) -> None:
            if getattr(settings, switch):
                asked.append(switch)

        monkeypatch.setattr(guard, "attempt", attempt)
        config = OmegaConf.create(plain)
        given = copy.deepcopy(algorithm)
        config.actor_rollout_ref.actor.update(given.pop("actor", {}))
        if dump := given.get("verl_ext", {}).get("dump_dir"):
            given["verl_ext"]["dump_dir"] = str(folder / dump)
        config.algorithm = OmegaConf.merge(config.algorithm, given)
        caplog.clear()
        self.refused, self.seen = "", []
        with caplog.at_level(logging.WARNING, "verl_ext"):
            try:
                self.seen = Fits(config).fit(batches())
            except VerlExtError as error:
                self.refused = str(error)
        self.warnings = {record.getMessage().replace(str(folder), "") for record in caplog.records}
        self.files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        self.asked = asked

    def differs(self, other: Shown) -> bool:
        """In what it computes, logs, writes or refuses; a warning counts too, for it says that nothing else differs."""
        return vars(self) != vars(other)


def moved(algorithm: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    section, name = path.split(".")
    found = copy.deepcopy(algorithm)
    found[section] = found.get(section, {}) | {name: value}
    return found


def test_every_setting_has_another_value_here() -> None:
    assert set(OTHER) == {
        f"{section}.{item.name}" for section, kind in SECTIONS.items() for item in dataclasses.fields(kind)
    }
    assert set(OF_STEPS) == set(STEPS)
    for name, kind in STEPS.items():
        fields = {item.name for item in dataclasses.fields(kind)} - ({"weights"} if name == "weigh_and_sum" else set())
        assert set(moved_away(kind) | OF_STEPS[name][2]) == fields, name


@pytest.mark.parametrize("run", RUNS)
def test_a_setting_shows_or_is_said_to_have_no_effect(run, plain, tmp_path, caplog, monkeypatch) -> None:
    more = (plain, tmp_path / "before", caplog, monkeypatch)
    before = Shown(RUNS[run], *more)
    assert bool(before.refused) == (run == "drgrpo on verl's loss")
    idle = []
    for path, values in OTHER.items():
        section, name = path.split(".")
        given = [value for value in values if value != RUNS[run].get(section, {}).get(name)]
        found = (
            Shown(moved(RUNS[run], path, value), plain, tmp_path / path / str(at), caplog, monkeypatch)
            for at, value in enumerate(given)
        )
        if given and not any(one.differs(before) for one in found):
            idle.append(path)
    if before.refused:
        assert "drgrpo.check_loss" not in idle
    else:  # a check of the loss changes nothing where the loss is right
        assert set(idle) <= {"drgrpo.check_loss"}


@pytest.mark.parametrize("path", OTHER)
def test_a_setting_shows_somewhere_in_what_is_computed_logged_or_written(
    path, plain, tmp_path, caplog, monkeypatch
) -> None:
    section = path.split(".")[0]
    for run, algorithm in sorted(RUNS.items(), key=lambda item: section not in (item[1]["adv_estimator"], *item[1])):
        before = Shown(algorithm, plain, tmp_path / run, caplog, monkeypatch)
        for at, value in enumerate(OTHER[path]):
            after = Shown(moved(algorithm, path, value), plain, tmp_path / f"{run}-{at}", caplog, monkeypatch)
            if not after.refused and (after.seen, after.files, after.asked) != (
                before.seen,
                before.files,
                before.asked,
            ):
                return
    pytest.fail(f"algorithm.{path} changes nothing")


@pytest.mark.parametrize("step", OF_STEPS)
def test_a_step_s_setting_shows_in_a_list(step, plain, tmp_path, caplog, monkeypatch) -> None:
    ahead, behind, settings = OF_STEPS[step]
    settings = moved_away(STEPS[step]) | settings

    def shown(name: str, given: dict[str, Any]) -> Shown:
        own = [{"step": step, **given}] if given or step != "condition" else []
        algorithm = {"adv_estimator": "compose", **KEYS, "compose": {"steps": [*ahead, *own, *behind]}}
        return Shown(algorithm, plain, tmp_path / name, caplog, monkeypatch)

    before = shown("before", {})
    assert not before.refused
    for name, values in settings.items():
        for value in values:
            more = {"anchor": "fixed"} if name == "fixed_anchor" else {}
            after = shown(f"{name}={values.index(value)}", {name: value, **more})
            assert not after.refused
            assert after.seen != before.seen, name
