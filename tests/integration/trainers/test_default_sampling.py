"""verl's default trainer with the package's dynamic sampling."""

from __future__ import annotations

from tests.integration.pipeline import Pipeline

GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")


def filtering(metric: str) -> tuple[str, ...]:
    return ("++algorithm.filter_groups.enable=True", f"++algorithm.filter_groups.metric={metric}")


def prompts_of(result) -> list[list[str]]:
    return [sorted(set(update.prompts)) for update in result.updates]


def test_a_group_whose_rewards_vary_is_trained_on_although_its_score_does_not(pipeline: Pipeline) -> None:
    """One prompt a step: `conflict` is kept; `dead` is dropped, and `live` drawn in its place."""
    two = "trainer.total_training_steps=2"
    result = pipeline.run(
        "filtered", *GDPO, "+algorithm.rewards.weights=[2,1]", *filtering("any_reward"), two, prompts=1
    )
    assert prompts_of(result) == [["conflict"], ["live"]]
    assert [result.metrics[step]["filter_groups/finished_total"] for step in (1, 2)] == [1, 2]
    assert result.metrics[1]["filter_groups/kept_with_constant_score_total"] == 1
    assert result.metrics[2]["training/filter_groups/evicted_samples"] == 1
    # gdpo learns from `conflict`, where the weights differ.
    assert result.metrics[1]["advantage/zero_share"] == 0


def test_groups_of_middle_accuracy_are_drawn(pipeline: Pipeline) -> None:
    """`conflict` has accuracy .5, `dead` 1, `live` .25."""
    bounds = "+algorithm.rewards={accuracy_key:acc,accuracy_between:[0.1,0.4]}"
    result = pipeline.run("filtered", "algorithm.adv_estimator=grpo", bounds, *filtering("accuracy_between"), prompts=1)
    assert prompts_of(result) == [["live"]]
    assert result.metrics[1]["filter_groups/too_easy_total"] == 2
