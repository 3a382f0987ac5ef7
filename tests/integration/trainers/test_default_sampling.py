"""verl's default trainer with the package's dynamic sampling."""

from tests.integration.pipeline import Pipeline

GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
FILTER = ("++algorithm.filter_groups.enable=True", "++algorithm.filter_groups.metric=any_reward")


def test_a_group_whose_rewards_vary_is_trained_on_although_its_score_does_not(pipeline: Pipeline) -> None:
    """One prompt a step: `conflict` is kept; `dead` is dropped, and `live` drawn in its place."""
    two = "trainer.total_training_steps=2"
    result = pipeline.run("filtered", *GDPO, "+algorithm.rewards.weights=[2,1]", *FILTER, two, prompts=1)
    assert [set(update.prompts) for update in result.updates] == [{"conflict"}, {"live"}]
    assert [result.metrics[step]["filter_groups/finished_total"] for step in (1, 2)] == [1, 2]
    assert result.metrics[1]["filter_groups/kept_with_constant_score_total"] == 1
    assert result.metrics[2]["training/filter_groups/evicted_samples"] == 1
    # gdpo learns from `conflict`, where the weights differ.
    assert result.metrics[1]["advantage/zero_share"] == 0
