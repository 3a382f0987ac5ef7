"""How the package gets into verl, and the error if it does not. Each test runs a program in a fresh interpreter."""

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
# verl's own estimators still work. The group has a correct and an incorrect response, so its std is sqrt(0.5).
VERLS_ESTIMATORS_WORK = """
import torch
from verl.trainer.ppo import core_algos
scores, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
for name in ("grpo", "rloo", "grpo_passk"):
    assert name in core_algos.ADV_ESTIMATOR_REGISTRY
advantages, _ = core_algos.get_adv_estimator_fn("grpo")(scores, mask, index=["a", "a"])
assert abs(advantages[0, 0].item() - 0.5 / 0.5 ** 0.5) < 1e-4, advantages
"""
ADDED_ESTIMATORS_RAISE = """
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


def run_program(*parts: str) -> Output:
    """Run the parts of a program in a fresh interpreter, which must end without an error."""
    code = PRELUDE + "\n".join(textwrap.dedent(part) for part in parts)
    done = fresh.run(code, environment=dict(os.environ))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return Output(done.stdout, done.stderr)


def test_verl_finds_all_estimators_and_its_registry_is_unchanged() -> None:
    output = run_program(
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
    found_by_verl = [f"({name!r},)" for name in (*ADDED_ESTIMATORS, "gdpo")]
    expected = [*found_by_verl, "compute_gdpo_outcome_advantage"]
    assert output.out.splitlines()[: len(expected)] == expected


def test_if_a_hook_cannot_be_installed_the_added_estimators_raise() -> None:
    """A function of verl has other parameters than its hook expects."""
    module = "verl.utils.config"
    change_parameters = f"""
    from verl_ext.hooks import after_import
    after_import({module!r}, lambda module: setattr(module, "validate_config", lambda settings: None))
    import {module}
    """
    output = run_program(change_parameters, VERLS_ESTIMATORS_WORK, ADDED_ESTIMATORS_RAISE)
    names = ("validate_config", "settings", "config")
    versions = (f"verl {version('verl')}", "0.9.0", "0.9.1")
    assert a_line_says(output.err, "ERROR verl_ext", module, *names, *versions)
    lines = output.out.splitlines()
    assert len(lines) == len(ADDED_ESTIMATORS)
    for line in lines:
        assert says(line, "REFUSED", module, *names, "doctor")
