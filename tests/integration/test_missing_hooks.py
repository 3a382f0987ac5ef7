"""What verl may lose: the run that does not need it goes on, the one that does is refused with the cause."""

import os
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

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
# A module of verl or of its libraries, what it loses, and the words of the error of the runs that need it.
LOST = {
    "the registry": (CORE, "del module.ADV_ESTIMATOR_REGISTRY", "ADV_ESTIMATOR_REGISTRY"),
    "RayPPOTrainer": (RAY, "del module.RayPPOTrainer", "RayPPOTrainer"),
    "the engine's function": (ENGINE, "del module.prepare_micro_batches", "prepare_micro_batches"),
    "attention functions": (ENGINE, "import transformers; transformers.AttentionInterface = None", "NoneType"),
}
STORY = """
import logging, sys
logging.basicConfig(level=logging.ERROR)
from verl_ext.hooks import after_import

def lose(module):
    {statement}

after_import({module!r}, lose)
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
    ("DEFAULT", GDPO, use_v1), ("SKIP", (*GDPO, SKIP), use_v1), ("OTHER", GDPO, not use_v1),
    ("VERLS", ("algorithm.adv_estimator=grpo",), None),
):
    try:
        if v1 is not None:
            hooks.require_hooked(hooks.TRAINERS[v1])  # as verl's main does
        started = Trainer(compose(*overrides))._verl_ext
        print(name, "started", [step.name for step in started.chain.steps] if started is not None else "")
    except IntegrationError as error:
        print(name, "refused", str(error).replace(chr(10), " "))
"""


@pytest.mark.parametrize("case", LOST)
def test_a_run_needs_the_hooks_that_it_uses_and_no_others(case: str) -> None:
    module, statement, words = LOST[case]
    done = fresh.run(STORY.format(module=module, statement=statement), environment=dict(os.environ))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    of_ray = "OTHER" if has_default_trainer() else "DEFAULT"
    refused = {"DEFAULT", "SKIP"} if module == CORE else {of_ray} if module == RAY else {"SKIP"}
    assert a_line_says(done.stdout, "VERLS started"), f"{done.stdout}\n{done.stderr}"
    assert all(a_line_says(done.stdout, f"{name} refused", words) for name in refused), done.stdout
    for name in {"DEFAULT"} - refused:
        assert a_line_says(done.stdout, f"{name} started", "whiten"), f"{done.stdout}\n{done.stderr}"


CHANGED = """
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


@pytest.mark.parametrize("default", [False, *[True] * has_default_trainer()])
def test_a_trainer_whose_methods_have_changed_rejects_every_run_that_uses_the_package(default: bool) -> None:
    """In the trainer's process, whichever main has started it."""
    module = TRAINERS[default]
    code = CHANGED.format(module=module, cls="PPOTrainer" if default else "RayPPOTrainer")
    done = fresh.run(code, environment=dict(os.environ))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for name in ("GDPO", "LOGGED", "SHARE"):
        assert a_line_says(done.stdout, f"{name} refused", module, "_save_checkpoint"), f"{done.stdout}\n{done.stderr}"
        assert not a_line_says(done.stdout, f"{name} started"), done.stdout
    assert a_line_says(done.stdout, "VERLS started"), done.stdout
    assert not a_line_says(done.stdout, "VERLS refused"), done.stdout


MOVED = """
import importlib.abc, runpy, sys

class Moved(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Moved())
sys.argv = ["main_ppo", *{arguments!r}]
runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
"""


def test_a_run_whose_trainer_has_moved_is_refused_before_ray_starts(tmp_path: Path) -> None:
    module = "verl.trainer.ppo.v1.trainer_base"
    arguments = ["+verl_ext=gdpo", "algorithm.rewards.keys=[a]", "actor_rollout_ref.rollout.n=8", "trainer.use_v1=True"]
    arguments.append(f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray")
    done = fresh.run(MOVED.format(module=module, arguments=arguments), folder=tmp_path)
    assert done.returncode == 1
    assert says(done.stderr, "IntegrationError", module, f"verl {version('verl')}", *TESTED), done.stderr
    assert not (tmp_path / "ray").exists()


def test_names_that_verls_trainer_has_lost_have_no_default() -> None:
    with pytest.raises(IntegrationError, match="local_trigger_step"):
        _ = Run("gdpo", trainer=SimpleNamespace(global_steps=1)).update
    with pytest.raises(IntegrationError, match="parameter_sync_step"):
        missing_responses(SimpleNamespace(config=None), 1)
