"""Names and signatures that others rely on; changing one is a new major version."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import verl_ext
from verl_ext import Batch, Chain, RunState, Settings, build, errors, run_state, use_run_state
from verl_ext.estimators import ESTIMATORS
from verl_ext.integration.advantage import estimator_function
from verl_ext.registry import BUILT_IN


def test_the_names_that_the_package_exports():
    assert verl_ext.__all__ == [
        "__version__",
        *("Balance", "Batch", "Centre", "Chain", "CheckpointError", "ClusterError", "Condition", "ConfigurationError"),
        *("DataError", "ESTIMATORS", "IntegrationError", "RolloutError", "RunState", "ScaleByMad", "ScaleByStd"),
        *("Settings", "Step", "Update", "VerlExtError", "WeighAndSum", "WeighByDifficulty", "WeighByHistory", "Whiten"),
        *("build", "estimator", "limited", "run_state", "use_run_state"),
    ]
    for name in verl_ext.__all__:
        assert getattr(verl_ext, name) is not None
    with pytest.raises(AttributeError, match="'rewards_of'"):
        _ = verl_ext.rewards_of


def test_an_old_name_ends_in_an_error_with_the_new_one():
    with pytest.raises(AttributeError, match="Step"):
        _ = verl_ext.Stateless


def test_the_estimators_by_name():
    assert set(verl_ext.ESTIMATORS) == set(BUILT_IN)  # no other package's are installed here
    assert set(BUILT_IN) >= {"compose", "dgpo", "drgrpo", "gdpo", "hadw"}  # those that configurations name
    with pytest.raises(TypeError):
        verl_ext.ESTIMATORS["mine"] = build


def test_the_modules_that_are_errors():
    assert issubclass(errors.ConfigurationError, ValueError)
    assert issubclass(errors.DataError, ValueError)
    assert issubclass(errors.IntegrationError, RuntimeError)
    assert issubclass(errors.CheckpointError, RuntimeError)
    for name in ("ConfigurationError", "DataError", "IntegrationError", "CheckpointError"):
        assert issubclass(getattr(errors, name), errors.VerlExtError)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (build, ["name", "settings"]),
        (run_state, []),
        (use_run_state, ["state"]),
        (Settings.parse, ["algorithm", "*loss_agg_mode"]),
        (Batch.of, ["rewards", "labels", "*groups", "*keys", "*lengths", "*accuracy", "*kl_reward"]),
        (Chain.__call__, ["self", "batch", "state"]),
        (Chain.init, ["self"]),
        (RunState, ["states", "warned"]),
        (RunState.reset, ["self"]),
        (RunState.state_dict, ["self"]),
        (RunState.load_state_dict, ["self", "data"]),
        (
            estimator_function("gdpo"),
            ["token_level_rewards", "response_mask", "index", "config", "**given"],
        ),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),
)
def test_the_parameters_of_a_public_call(function, parameters):
    marks = {inspect.Parameter.KEYWORD_ONLY: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = [marks.get(p.kind, "") + p.name for p in inspect.signature(function).parameters.values()]
    assert found == parameters


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_registered_functions_are_told_apart_by_name(name):
    assert estimator_function(name).__name__ == f"compute_{name}_advantage"


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("verl_ext", ("verl", "ray", "torch", "numpy", "omegaconf", "hydra")),
        (
            "verl_ext.estimators, verl_ext.core.metrics, verl_ext.core.rows",
            ("verl", "ray", "omegaconf", "hydra", "transformers"),
        ),
    ],
    ids=["the package", "the pure core"],
)
def test_importing_it_imports_nothing_heavy(modules, heavy):
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
