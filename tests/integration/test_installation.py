"""How the package gets into verl, and what is said where it does not. One fresh interpreter a story."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass

from tests import fresh
from tests.facts import a_line_says, says
from verl_ext.registry import BUILT_IN

PRELUDE = """
import logging, sys, warnings
warnings.simplefilter("always")
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", force=True)
"""
# Estimators of verl's own still work: one group of two, right and wrong, std sqrt(0.5).
OTHERS_WORK = """
import torch
from verl.trainer.ppo import core_algos
scores, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
for name in ("grpo", "rloo", "grpo_passk"):
    assert name in core_algos.ADV_ESTIMATOR_REGISTRY
advantages, _ = core_algos.get_adv_estimator_fn("grpo")(scores, mask, index=["a", "a"])
assert abs(advantages[0, 0].item() - 0.5 / 0.5 ** 0.5) < 1e-4, advantages
"""
REFUSING = """
from verl_ext.errors import IntegrationError
from verl_ext.registry import BUILT_IN
for name in BUILT_IN:
    try:
        core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=scores, response_mask=mask, index=["a", "a"], config=None
        )
    except IntegrationError as error:
        print("REFUSED", name, str(error).replace(chr(10), " | "))
    else:
        raise SystemExit(f"{name} computed")
"""


@dataclass
class Told:
    out: str
    err: str


def story(*parts: str, **environment: str) -> Told:
    """Run the parts in an interpreter that has not seen verl, which must end well."""
    code = PRELUDE + "\n".join(textwrap.dedent(part) for part in parts)
    done = fresh.run(code, environment=os.environ | environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return Told(done.stdout, done.stderr)


def breaking(module: str, statement: str) -> str:
    """A verl whose `module` differs by `statement`, run before any hook sees the module."""
    return f"""
    from verl_ext.integration.hooks import after_import

    def changed(module):
        {statement}

    after_import({module!r}, changed)
    """


def test_import_verl_registers_all_and_keeps_what_it_replaced() -> None:
    told = story(
        """
        import verl
        assert "verl.trainer.ppo.core_algos" not in sys.modules, "the plugin must not import what verl does not"
        from verl.trainer.ppo import core_algos
        registry = core_algos.ADV_ESTIMATOR_REGISTRY
        from verl_ext.registry import BUILT_IN
        for name in BUILT_IN:
            function = core_algos.get_adv_estimator_fn(name)
            assert function.__module__ == "verl_ext.integration.advantage", name
            print(name, getattr(function.replaced, "__qualname__", None))
        assert core_algos.get_adv_estimator_fn(core_algos.AdvantageEstimator.GDPO) is registry["gdpo"]
        """
    )
    replaced = dict.fromkeys(BUILT_IN, "None") | {"gdpo": "compute_gdpo_outcome_advantage"}
    assert told.out.splitlines()[: len(BUILT_IN)] == [f"{name} {replaced[name]}" for name in BUILT_IN]


def test_loading_the_plugin_again_and_reloading_verl_s_module_change_nothing() -> None:
    story(
        """
        import importlib
        import verl
        from verl.trainer.ppo import core_algos, ray_trainer
        from verl_ext.integration import hooks
        from verl_ext.integration import plugin
        before = dict(core_algos.ADV_ESTIMATOR_REGISTRY)
        advantage, fit = ray_trainer.compute_advantage, ray_trainer.RayPPOTrainer.fit
        count = len(hooks.HOOKS)
        importlib.reload(plugin)
        importlib.reload(plugin)
        assert core_algos.ADV_ESTIMATOR_REGISTRY == before
        assert (ray_trainer.compute_advantage, ray_trainer.RayPPOTrainer.fit) == (advantage, fit)
        assert len(hooks.HOOKS) == count
        assert before["gdpo"].replaced.__module__ == "verl.trainer.ppo.core_algos"
        # verl's module run anew: what it registers is replaced again, and no function of ours stands for another.
        importlib.reload(core_algos)
        again = core_algos.ADV_ESTIMATOR_REGISTRY["gdpo"]
        assert again.__module__ == "verl_ext.integration.advantage"
        assert again.replaced.__module__ == "verl.trainer.ppo.core_algos"
        assert hooks.HOOKS["verl.trainer.ppo.core_algos"].state == "holds"
        """
    )


def test_verl_s_gdpo_is_reported_as_replaced_once_a_run() -> None:
    told = story(
        """
        import verl
        from tests.integration.configs import compose
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
        from verl_ext.integration.trainers.attach import attach

        class Trainer(PPOTrainer):
            def on_step_end(self): ...
            def on_sample_end(self): ...

        config = compose("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[a]")
        trainer = Trainer.__new__(Trainer)
        Trainer.__init__(trainer, config)
        """
    )
    replaced = [line for line in told.err.splitlines() if "in place of" in line]
    assert len(replaced) == 1
    assert "INFO verl_ext" in replaced[0]
    assert says(replaced[0], "gdpo", "verl.trainer.ppo.core_algos.compute_gdpo_outcome_advantage")


def test_plugins_can_be_switched_off() -> None:
    story(
        """
        import verl
        from verl.trainer.ppo import core_algos
        assert "verl_ext" not in sys.modules
        assert "hadw" not in core_algos.ADV_ESTIMATOR_REGISTRY
        assert core_algos.ADV_ESTIMATOR_REGISTRY["gdpo"].__module__ == "verl.trainer.ppo.core_algos"
        """,
        VERL_USE_EXTERNAL_PLUGINS="none",
    )


def test_the_module_can_be_named_where_entry_points_are_off() -> None:
    story(
        """
        import verl
        from verl.trainer.ppo import core_algos
        assert core_algos.ADV_ESTIMATOR_REGISTRY["hadw"].__module__ == "verl_ext.integration.advantage"
        """,
        VERL_USE_EXTERNAL_PLUGINS="none",
        VERL_USE_EXTERNAL_MODULES="verl_ext.integration.plugin",
    )


def test_an_error_of_the_plugin_itself_is_not_lost() -> None:
    """verl logs what a plugin raises at DEBUG only."""
    told = story(
        """
        import verl_ext.cpu.plugin
        def install():
            raise RuntimeError("something in the plugin broke")
        verl_ext.cpu.plugin.install = install
        import verl
        """,
        OTHERS_WORK,
        REFUSING,
    )
    assert a_line_says(told.err, "ERROR verl_ext", "RuntimeError: something in the plugin broke")
    assert a_line_says(told.err, "RuntimeWarning", "verl_ext")
    assert told.out.count("something in the plugin broke") == len(BUILT_IN)
