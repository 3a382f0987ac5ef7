"""Rule-based reward functions with named components, in the signature that verl calls.

| module | components in addition to `score` |
|---|---|
| `verl_ext.rewards.tool_calling` | `format`, `correctness`, and `length` if it is enabled |
| `verl_ext.rewards.gsm8k` | `correctness`, `integer`, `format` |
| `verl_ext.rewards.boxed_math` | `accuracy` |

`score` is the sum of the components. Every sample has the same keys. Select a module with

    reward.custom_reward_function.path=pkg://verl_ext.rewards.tool_calling
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.matching=optimal

Whatever a response contains, it gets a score. An invalid ground truth raises `DataError`, an invalid argument
`ConfigurationError`. verl's default trainer logs an exception of a reward function and drops the sample, so both are
checked before training: the arguments when the run starts, and the ground truths with
`check_ground_truth(ground_truth)` when the data are prepared. `boxed_math` also raises `VerlExtError` if the machine
gives its child process no CPU time (see `math_judge`).

The arguments are the fields of a module's `Options`. Its `components` are the names in the table, which the check of
the configuration compares with `algorithm.rewards.keys`. Its `accuracies` are the names, including `score`, whose
values lie in [0, 1] and which can be used as the accuracy.
"""
