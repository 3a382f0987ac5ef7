"""What verl may lose: the run that does not need it goes on, the one that does is refused with the cause."""

import os
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import fresh
from tests.facts import a_line_says, says
from tests.integration.conftest import has_default_trainer
from verl_ext.advantages.run import Run
from verl_ext.errors import IntegrationError
from verl_ext.hooks import TESTED
from verl_ext.settings import Settings
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
from verl_ext.checks.start import CheckedTrainer
from verl_ext.errors import IntegrationError
from verl_ext.trainers.mixin import WithEstimators
from verl_ext.update import UpdateTrainer

GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
SKIP = "+algorithm.verl_ext.skip_zero_advantage=True"
use_v1 = bool(compose().trainer.use_v1)

class Trainer:
    def __init__(self, config):
        pass

for part in (WithEstimators, UpdateTrainer, CheckedTrainer):
    Trainer = hooks.under(part, Trainer)

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


TAKEN = """
import sys
from pathlib import Path
from types import ModuleType
import verl_ext

# The package without a subpackage: neither its files nor its lines in the table of hooks.
lines = Path(verl_ext.__file__).with_name("plugin.py").read_text().splitlines()
plugin = sys.modules["verl_ext.plugin"] = ModuleType("verl_ext.plugin")
exec("\\n".join(line for line in lines if {subpackage!r} not in line), vars(plugin))
sys.modules[{subpackage!r}] = None

from verl.trainer.ppo import ray_trainer
from tests.configs import compose
from verl_ext.errors import IntegrationError

ray_trainer.RayPPOTrainer.__mro__[-2].__init__ = lambda self, config: None
GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
SKIP = "+algorithm.verl_ext.skip_zero_advantage=True"
for name, overrides in (("GDPO", GDPO), ("SKIP", (*GDPO, SKIP)), ("VERLS", ("algorithm.adv_estimator=grpo",))):
    try:
        run = getattr(ray_trainer.RayPPOTrainer(compose(*overrides)), "_verl_ext", None)
        print(name, "started", None if run is None else [step.name for step in run.chain.steps])
    except IntegrationError as error:
        print(name, "refused", error)
"""


@pytest.mark.parametrize(
    ("subpackage", "refused"),
    [
        ("verl_ext.checks", {"GDPO", "SKIP"}),
        ("verl_ext.update", {"SKIP"}),
        ("verl_ext.trainers.ray_trainer", {"GDPO", "SKIP"}),
    ],
)
def test_without_a_subpackage_the_runs_that_need_it_are_refused(subpackage: str, refused: set[str]) -> None:
    done = fresh.run(TAKEN.format(subpackage=subpackage), environment=dict(os.environ))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert a_line_says(done.stdout, "VERLS started", "None"), done.stdout
    for name in ("GDPO", "SKIP"):
        wanted = ("refused", "doctor") if name in refused else ("started", "whiten")
        assert a_line_says(done.stdout, name, *wanted), done.stdout


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
        _ = Run("gdpo", Settings(), None, SimpleNamespace(global_steps=1)).update
    with pytest.raises(IntegrationError, match="parameter_sync_step"):
        missing_responses(SimpleNamespace(config=None), 1)
