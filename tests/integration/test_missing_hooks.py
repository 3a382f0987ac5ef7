"""What happens if verl lacks a function: only the runs that need its hook are refused, with the cause."""

import os
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tests import fresh
from tests.facts import a_line_says, says
from tests.integration.conftest import has_default_trainer
from verl_ext.errors import IntegrationError
from verl_ext.hooks import TESTED, TRAINERS
from verl_ext.run import Run
from verl_ext.trainers.default_trainer import missing_responses

CORE = "verl.trainer.ppo.core_algos"
ENGINE = "verl.workers.engine.fsdp.transformer_impl"
RAY = "verl.trainer.ppo.ray_trainer"


class Loss(NamedTuple):
    """Something that verl or one of its libraries lacks."""

    module: str
    statement: str
    """The statement that removes it when the module has been imported."""
    words: str
    """The words of the error."""
    refused: set[str]
    """The runs of `START_RUNS` that need it."""


OTHER_TRAINER = "OTHER" if has_default_trainer() else "DEFAULT"
"""The run of `START_RUNS` with `RayPPOTrainer`."""
LOSSES = {
    "the registry": Loss(CORE, "del module.ADV_ESTIMATOR_REGISTRY", "ADV_ESTIMATOR_REGISTRY", {"DEFAULT", "SKIP"}),
    "RayPPOTrainer": Loss(RAY, "del module.RayPPOTrainer", "RayPPOTrainer", {OTHER_TRAINER}),
    "the engine's function": Loss(ENGINE, "del module.prepare_micro_batches", "prepare_micro_batches", {"SKIP"}),
    "attention functions": Loss(
        ENGINE, "import transformers; transformers.AttentionInterface = None", "NoneType", {"SKIP"}
    ),
}
START_RUNS = """
import logging, sys
logging.basicConfig(level=logging.ERROR)
from verl_ext.hooks import after_import

def remove(module):
    {statement}

after_import({module!r}, remove)
import verl
from tests.configs import compose
from verl_ext import hooks
from verl_ext.errors import IntegrationError
from verl_ext.trainers.mixin import TrainerMixin, with_mixin

GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
SKIP = "+algorithm.verl_ext.skip_zero_advantage=True"
use_v1 = bool(compose().trainer.use_v1)

class Trainer:
    def __init__(self, config):
        pass

Trainer = with_mixin(TrainerMixin, Trainer)

for name, overrides, v1 in (
    ("DEFAULT", GDPO, use_v1),
    ("SKIP", (*GDPO, SKIP), use_v1),
    ("OTHER", GDPO, not use_v1),
    ("VERLS", ("algorithm.adv_estimator=grpo",), None),
):
    try:
        if v1 is not None:
            hooks.require_hooked(hooks.TRAINERS[v1])  # as verl's main program does
        run = Trainer(compose(*overrides))._verl_ext
        print(name, "started", [step.name for step in run.chain.steps] if run is not None else "")
    except IntegrationError as error:
        print(name, "refused", str(error).replace(chr(10), " "))
"""


def output_of(code: str) -> str:
    """Run a program in a new process, which must end without an error. Return its output."""
    done = fresh.run(code, environment=dict(os.environ))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("case", LOSSES)
def test_only_the_runs_that_need_a_missing_function_are_refused(case: str) -> None:
    module, statement, words, refused = LOSSES[case]
    output = output_of(START_RUNS.format(module=module, statement=statement))
    assert a_line_says(output, "VERLS started"), output
    for name in refused:
        assert a_line_says(output, f"{name} refused", words), output
    if "DEFAULT" not in refused:
        assert a_line_says(output, "DEFAULT started", "whiten"), output


START_CHANGED_TRAINER = """
from verl_ext.hooks import after_import

def change(module):
    del module.{cls}._save_checkpoint

after_import({module!r}, change)
import verl
import importlib
from tests.configs import compose
from verl_ext.errors import IntegrationError

module = importlib.import_module({module!r})
module.{cls}.__mro__[-2].__init__ = lambda self, config: None
Trainer = module.get_trainer_cls("sync") if hasattr(module, "get_trainer_cls") else module.RayPPOTrainer
GRPO = "algorithm.adv_estimator=grpo"
for name, overrides in (
    ("GDPO", ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")),
    ("LOGGED", (GRPO, "+algorithm.rewards.keys=[acc,format]")),
    ("SHARE", (GRPO, "+algorithm.verl_ext.share_prompts=True")),
    ("VERLS", (GRPO,)),
):
    config = compose(*overrides)
    for start in (lambda: Trainer(config), lambda: Trainer(config=config)):
        try:
            start()
            print(name, "started")
        except IntegrationError as error:
            print(name, "refused", str(error).replace(chr(10), " "))
"""


@pytest.mark.parametrize("default", [False, True] if has_default_trainer() else [False])
def test_a_trainer_without_an_overridden_method_rejects_runs_of_verl_ext(default: bool) -> None:
    """The error is raised in the trainer's process, whichever main program has started the trainer."""
    module = TRAINERS[default]
    cls = "PPOTrainer" if default else "RayPPOTrainer"
    output = output_of(START_CHANGED_TRAINER.format(module=module, cls=cls))
    for name in ("GDPO", "LOGGED", "SHARE"):
        assert a_line_says(output, f"{name} refused", module, "_save_checkpoint"), output
        assert not a_line_says(output, f"{name} started"), output
    assert a_line_says(output, "VERLS started"), output
    assert not a_line_says(output, "VERLS refused"), output


START_WITHOUT_MODULE = """
import importlib.abc, runpy, sys

class WithoutModule(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, WithoutModule())
sys.argv = ["main_ppo", *{arguments!r}]
runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
"""


def test_a_missing_trainer_module_is_an_error_before_ray_starts(tmp_path: Path) -> None:
    module = "verl.trainer.ppo.v1.trainer_base"
    arguments = [
        "+verl_ext=gdpo",
        "algorithm.rewards.keys=[a]",
        "actor_rollout_ref.rollout.n=8",
        "trainer.use_v1=True",
        f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray",
    ]
    done = fresh.run(START_WITHOUT_MODULE.format(module=module, arguments=arguments), folder=tmp_path)
    assert done.returncode == 1
    assert says(done.stderr, "IntegrationError", module, f"verl {version('verl')}", *TESTED), done.stderr
    assert not (tmp_path / "ray").exists()


def test_a_trainer_without_a_counter_of_updates_is_an_error() -> None:
    run = Run("gdpo", trainer=SimpleNamespace(global_steps=1))
    with pytest.raises(IntegrationError, match="local_trigger_step"):
        _ = run.update
    trainer = SimpleNamespace(config=None)
    with pytest.raises(IntegrationError, match="parameter_sync_step"):
        missing_responses(trainer, 1)
