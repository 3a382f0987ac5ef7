"""Rule-based scorers with named components, in the signature that verl calls.

| module | components besides `score` |
|---|---|
| `verl_ext.rewards.tool_calling` | `format`, `correctness`, and `length` if asked for |
| `verl_ext.rewards.gsm8k` | `correctness`, `integer`, `format` |
| `verl_ext.rewards.boxed_math` | `accuracy` |

`score` is the sum of the components. Every sample has the same keys. Choose a module by

    reward.custom_reward_function.path=pkg://verl_ext.rewards.tool_calling
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.matching=optimal

Any answer is scored. An invalid ground truth raises `DataError`, an invalid argument `ConfigurationError`. verl's
default trainer logs an exception of a reward function and drops the sample, so both are checked before training: the
arguments at the start, the truths by `check_ground_truth(ground_truth)` where the data are prepared.

The arguments are the fields of a module's `Options`. Its `components` are the names in the table, which the start-up
check compares to `algorithm.rewards.keys`; its `accuracies` are the names, `score` among them, whose values lie in
[0, 1]: only these can be an accuracy.
"""
