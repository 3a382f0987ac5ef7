"""verl's own FSDP engine on one and two ranks: with each setting, gradients are those of verl to rounding."""

import pytest
import torch

from tests.update import rank_tasks as tasks
from tests.update import verl_actor

SLOW = pytest.mark.slow
WAYS = tasks.MARKS.keys()
STRATEGIES = pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
"""Values of verl's setting `actor.strategy`; `fsdp` is its default."""


def difference(values, reference):
    """Return the norm of the difference relative to the norm of the reference."""
    return float((values - reference).norm() / reference.norm())


@STRATEGIES
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", [3, pytest.param(48, marks=SLOW, id="all")])
def test_gradients_of_each_setting_are_those_of_verl(folder, strategy, ranks, count, record_property):
    """No difference is more than twice the largest of the control, which is verl's own engine.

    The control has other micro-batches and another function of attention, because other micro-batches alone leave
    most sums the same.
    """
    results = tasks.run_on_ranks(tasks.gradients_of_cases, ranks, folder, cases=count, strategy=strategy)
    cases = [case for results_of_rank in results for case in results_of_rank.values()]
    assert len(cases) >= ranks * count
    largest = dict.fromkeys(WAYS, 0.0)
    for case in cases:
        for way, trained in case.items():
            change = difference(trained["gradients"], case["verl"]["gradients"])
            largest[way] = max(largest[way], change)
            assert_metrics_of_way(way, trained)
    record_property("largest", str(largest))
    assert max(largest.values()) <= 2 * largest["control"]
    assert largest["control"] < 1e-5


def assert_metrics_of_way(way, trained):
    """Fail unless the metrics of an update say what was skipped and shared."""
    names = {"actor/rows_kept", "actor/tokens_kept", "actor/prompt_tokens_saved", "actor/prompts_recomputed"}
    metrics = {name: torch.tensor(values).double().mean() for name, values in trained["metrics"].items()}
    if way in ("verl", "control"):
        assert names.isdisjoint(metrics)
        return
    skips_rows = way in ("skip", "both")
    shares_prompts = way in ("share", "both")
    assert (metrics["actor/rows_kept"] < 0.8) == skips_rows
    assert ("actor/prompt_tokens_saved" in metrics) == shares_prompts


@SLOW
@STRATEGIES
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_updates_with_adamw_end_at_the_weights_of_verl(folder, strategy, ranks, record_property):
    for results in tasks.run_on_ranks(tasks.twenty_updates, ranks, folder, strategy=strategy):
        assert len(results["verl"]["gradients"]) == 20
        for name in ("gradients", "weights"):
            errors = {way: difference(results[way][name], results["verl"][name]) for way in WAYS}
            record_property(name, str(errors))
            assert max(errors.values()) <= 2 * errors["control"] < 1e-4


@STRATEGIES
def test_each_loss_supports_a_rank_without_advantages_and_a_prompt_without_tokens(folder, strategy):
    """verl's bypass_mode raises for a micro-batch without a token, and the other ranks would wait for it forever."""
    for gradients in tasks.run_on_ranks(tasks.gradients_of_losses, 2, folder, strategy=strategy):
        for (loss, way), found in gradients.items():
            assert difference(found, gradients[loss, "verl"]) < 1e-5, (loss, way)


@STRATEGIES
def test_share_prompts_gives_the_results_of_verl_for_each_model(folder, strategy, record_property):
    """Gradients of an update, and log-probabilities and entropies of a pass at their tokens."""
    [results] = tasks.run_on_ranks(tasks.results_of_models, 1, folder, strategy=strategy)
    unsupported = results.pop("window")
    assert "sliding_window" in unsupported["share"]
    for model, ways in results.items():
        usual = ways["verl"]
        errors = {way: difference(ways[way]["gradients"], usual["gradients"]) for way in ("control", "share")}
        record_property(model, str(errors))
        assert errors["share"] <= 2 * errors["control"] < 1e-5, model
        for kind in ("log_probs", "entropy"):
            torch.testing.assert_close(ways["share"][kind], usual[kind], atol=2e-6, rtol=0)


@STRATEGIES
def test_first_pass_finds_wrong_attention_of_one_rank_and_ends_all_ranks(folder, strategy):
    errors = tasks.run_on_ranks(tasks.error_of_wrong_attention, 2, folder, strategy=strategy)
    assert all("share_prompts" in error for error in errors)


@STRATEGIES
def test_micro_batch_is_packed_once_although_layers_are_computed_twice(folder, strategy):
    [counts] = tasks.run_on_ranks(tasks.count_plans, 1, folder, strategy=strategy)
    assert counts["micro_batches"] > 1
    calls_per_micro_batch = 2 * 2  # two layers; gradient checkpointing computes them again
    assert counts["calls_of_layers"] == calls_per_micro_batch * counts["micro_batches"]
    assert counts["plans"] == counts["micro_batches"]
    assert counts["different_plans_seen"] == counts["micro_batches"]


@STRATEGIES
def test_checkpoint_can_be_loaded_without_verl_ext(folder, strategy):
    [config] = tasks.run_on_ranks(tasks.config_of_checkpoint, 1, folder, strategy=strategy)
    assert config["model_type"] == "qwen2"
    assert "verl_ext" not in str(config)


def test_verl_accepts_the_configuration_of_the_gpu_tests():
    """The GPU tests themselves run seldom."""
    from verl.utils.config import omega_conf_to_dataclass

    actor = verl_actor.configuration("model", gpu=True).actor
    assert omega_conf_to_dataclass(actor).use_dynamic_bsz
