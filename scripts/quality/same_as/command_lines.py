"""Command lines of `check`, good and bad. `{folder}` has the files of `commands.write_files`, `{root}` the version."""

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
USUAL = (f"{ROLLOUT}.n=8", f"{ACTOR}.use_dynamic_bsz=True")
GRPO = ("algorithm.adv_estimator=grpo", *USUAL)
GDPO = ("+verl_ext=gdpo", "algorithm.rewards.keys=[acc,format]", *USUAL)
KEYS = "+algorithm.rewards.keys=[acc,format]"
HADW = ("algorithm.adv_estimator=hadw", *USUAL)
DRGRPO = ("algorithm.adv_estimator=drgrpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", *USUAL)
COMPOSE = ("algorithm.adv_estimator=compose", *USUAL)
DAPO = ("reward.reward_manager.name=dapo", "+reward.reward_kwargs.overlong_buffer_cfg.enable=True")
FILTER = "algorithm.filter_groups.enable=True"
PATH = "reward.custom_reward_function.path"
NAME = "reward.custom_reward_function.name"
GSM8K = f"{PATH}=pkg://verl_ext.rewards.gsm8k"
DATA = ("data.train_files={folder}/train.parquet", "data.val_files={folder}/val.parquet")
TRIED = (*GDPO, *DATA, f"{PATH}={{folder}}/reward.py", "--try-reward", "--rows", "2")

# A name for each, for the printed differences, and its arguments.
COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gdpo with its preset", GDPO),
    ("grpo", GRPO),
    ("dgpo", ("+verl_ext=dgpo", *USUAL)),
    ("hadw", HADW),
    ("drgrpo", (*DRGRPO, f"{ACTOR}.loss_scale_factor=3000")),
    ("compose", (*COMPOSE, "+algorithm.compose.steps=[weighted_sum,center,scale_by_std]")),
    ("dara with its preset", ("+verl_ext=dara", "algorithm.rewards.keys=[acc,format]", *USUAL)),
    ("fgrpo", ("+verl_ext=fgrpo", *USUAL)),
    (
        "verl's names, whitened over tokens",
        (
            "algorithm.adv_estimator=gdpo",
            "+algorithm.gdpo_reward_keys=[acc,format]",
            "+algorithm.gdpo.whiten=token",
            *USUAL,
        ),
    ),
    ("recipe quickstart/gdpo", ("--config-path", "{root}/recipes", "--config-name", "quickstart/gdpo")),
    ("recipe gsm8k/gdpo", ("--config-path", "{root}/recipes", "--config-name", "gsm8k/gdpo")),
    ("recipe math/hadw", ("--config-path", "{root}/recipes", "--config-name", "math/hadw")),
    ("recipe tool_calling/drgrpo", ("--config-path", "{root}/recipes", "--config-name", "tool_calling/drgrpo")),
    ("a reward function that is tried", TRIED),
    ("a list of two sums", (*COMPOSE, "+algorithm.compose.steps=[weighted_sum,center,weighted_sum]")),
    ("+ before a setting that exists", (*GDPO, "+algorithm.rewards.weights=[1,2]")),
    (
        "6 GPUs with batches for 8",
        (
            *GDPO,
            "trainer.n_gpus_per_node=6",
            "data.train_batch_size=8",
            f"{ACTOR}.ppo_mini_batch_size=8",
        ),
    ),
    (
        "6 GPUs with batches for 8 on the other trainer",
        (
            *GDPO,
            "trainer.use_v1=False",
            "trainer.n_gpus_per_node=6",
            "data.train_batch_size=8",
            f"{ACTOR}.ppo_mini_batch_size=8",
            f"{ACTOR}.use_dynamic_bsz=False",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
        ),
    ),
    ("a reward function under verl's old name", (*GDPO, "+custom_reward_function.path={folder}/reward.py")),
    ("a misspelt estimator", ("algorithm.adv_estimator=gdop", *USUAL)),
    ("a misspelt key", (*GDPO[:1], *USUAL, GSM8K, "algorithm.rewards.keys=[corectness]")),
    ("a misspelt setting", (*GDPO, "+algorithm.gdpo.whitn=token")),
    (
        "a misspelt setting without the preset",
        (
            "algorithm.adv_estimator=gdpo",
            KEYS,
            "+algorithm.gdop.whiten=token",
            *USUAL,
        ),
    ),
    ("a misspelt preset", ("+verl_ext=gdpoo", *USUAL)),
    ("one response", ("algorithm.adv_estimator=hadw", f"{ROLLOUT}.n=1", USUAL[1])),
    ("one response of grpo", ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=1", USUAL[1])),
    ("drgrpo with another loss", ("algorithm.adv_estimator=drgrpo", *USUAL)),
    ("drgrpo without a factor", DRGRPO),
    ("dapo's penalty lost through keys", (*GDPO, *DAPO)),
    (
        "dapo's penalty among the keys",
        (
            "+verl_ext=gdpo",
            "algorithm.rewards.keys=[acc,overlong_reward]",
            *USUAL,
            *DAPO,
            "+reward.reward_kwargs.overlong_buffer_cfg.log=True",
        ),
    ),
    ("an accuracy of two keys", (*HADW, "+algorithm.rewards.keys=[correctness,format]")),
    ("an accuracy that the function does not return", (*HADW, GSM8K, "+algorithm.rewards.accuracy_key=acc")),
    ("a wrong number of weights", (*GDPO, "algorithm.rewards.weights=[1]")),
    ("no keys", ("+verl_ext=gdpo", *USUAL)),
    ("KL in the reward with gdpo", (*GDPO, "algorithm.use_kl_in_reward=True")),
    ("verl's names alone", ("algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[acc,format]", *USUAL)),
    (
        "any_reward on the other trainer",
        (
            *GDPO,
            FILTER,
            "algorithm.filter_groups.metric=any_reward",
            "trainer.use_v1=False",
        ),
    ),
    ("accuracy_between without bounds", (*GRPO, FILTER, "algorithm.filter_groups.metric=accuracy_between")),
    (
        "a negative weight of maxrl",
        (
            "algorithm.adv_estimator=maxrl",
            KEYS,
            "+algorithm.rewards.weights=[2,-1]",
            *USUAL,
        ),
    ),
    ("rewards per turn under grpo", (*GRPO, KEYS, "+algorithm.rewards.per_turn=[format]")),
    ("a rubric under grpo", (*GRPO, KEYS, "+algorithm.rewards.rubrics=[format]")),
    ("rejected responses under grpo", (*GRPO, KEYS, "+algorithm.rewards.rejected=exclude")),
    ("conditions under grpo", (*GRPO, KEYS, "+algorithm.rewards.conditions={format:{reward:acc,at_least:1}}")),
    ("a warning with --strict", (*GRPO, f"{ROLLOUT}.temperature=0", "--strict")),
    ("a micro-batch shorter than a sequence", (*GRPO, f"{ACTOR}.ppo_max_token_len_per_gpu=1000")),
    ("a checkpoint without the optimizer", (*GRPO, f"{ACTOR}.checkpoint.save_contents=[model]")),
    (
        "a finished run that resumes",
        (
            *GDPO,
            *DATA,
            "trainer.default_local_dir={folder}/finished",
            "trainer.total_training_steps=6",
            "trainer.resume_mode=auto",
        ),
    ),
    (
        "an update without zeros",
        (
            *GDPO,
            "algorithm.verl_ext.skip_zero_advantage=True",
            f"{ACTOR}.policy_loss.loss_mode=clip_cov",
        ),
    ),
    ("a key that the function does not return", (*TRIED, "algorithm.rewards.keys=[acc,formt]")),
    ("a data source of validation without a scorer", (*TRIED, "data.val_files={folder}/other.parquet")),
    (
        "a format regex without DOTALL",
        (
            *TRIED,
            f"{NAME}=without_dotall",
            "--answer-template",
            "<think>\nwell\n</think>{{}}",
        ),
    ),
    ("a regex that backtracks", (*TRIED, f"{NAME}=backtracks", "--seconds", "2")),
)  # fmt: skip
