"""How the package gets into verl, and what is said where it does not. One fresh interpreter a story."""

import os
import textwrap
from dataclasses import dataclass
from importlib.metadata import version

from tests import fresh
from tests.facts import a_line_says, says
from verl_ext.registry import ADDED_ESTIMATORS

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
from verl_ext.registry import ADDED_ESTIMATORS
for name in ADDED_ESTIMATORS:
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
class Output:
    out: str
    err: str


def story(*parts: str, **environment: str) -> Output:
    """Run the parts in an interpreter that has not seen verl, which must end well."""
    code = PRELUDE + "\n".join(textwrap.dedent(part) for part in parts)
    done = fresh.run(code, environment=os.environ | environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return Output(done.stdout, done.stderr)


def test_verl_finds_all_and_its_registry_keeps_what_it_had() -> None:
    output = story(
        """
        import verl
        assert "verl.trainer.ppo.core_algos" not in sys.modules, "the plugin must not import what verl does not"
        from verl.trainer.ppo import core_algos
        from verl_ext.registry import ADDED_ESTIMATORS
        for name in (*ADDED_ESTIMATORS, core_algos.AdvantageEstimator.GDPO):
            print(core_algos.get_adv_estimator_fn(name).args)
        print(core_algos.ADV_ESTIMATOR_REGISTRY["gdpo"].__name__)
        """
    )
    found = [*(f"({name!r},)" for name in (*ADDED_ESTIMATORS, "gdpo")), "compute_gdpo_outcome_advantage"]
    assert output.out.splitlines()[: len(found)] == found


def test_a_hook_that_does_not_find_its_name_says_so_and_the_estimators_raise() -> None:
    """Here one whose parameters are others, as the hook sees it."""
    module, named = "verl.utils.config", ("validate_config", "settings", "config")
    changed = f"""
    from verl_ext.hooks import after_import
    after_import({module!r}, lambda module: setattr(module, "validate_config", lambda settings: None))
    import {module}
    """
    out = story(changed, OTHERS_WORK, REFUSING)
    versions = (f"verl {version('verl')}", "0.9.0", "0.9.1")
    assert a_line_says(out.err, "ERROR verl_ext", module, *named, *versions)
    assert len(out.out.splitlines()) == len(ADDED_ESTIMATORS)
    assert all(says(line, "REFUSED", module, *named, "doctor") for line in out.out.splitlines())
