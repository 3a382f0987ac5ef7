"""Configurations that are rejected, that have a warning, or that are accepted."""

from verl_ext.checks import estimators

ACTOR = "actor_rollout_ref.actor"
KEYS = "+algorithm.rewards.keys=[acc,format]"
GRPO = "algorithm.adv_estimator=grpo"
GDPO = "algorithm.adv_estimator=gdpo"
DGPO = "algorithm.adv_estimator=dgpo"
DRGRPO = "algorithm.adv_estimator=drgrpo"
HADW = "algorithm.adv_estimator=hadw"
GD2PO = "algorithm.adv_estimator=gd2po"
SAW = "algorithm.adv_estimator=saw"
DARA = "algorithm.adv_estimator=dara"
RVPO = "algorithm.adv_estimator=rvpo"
LITEPPO = "algorithm.adv_estimator=liteppo"
GDPO_WITH_KEYS = (GDPO, KEYS)
GDPO_BY_NAMES_OF_VERL = (GDPO, "+algorithm.gdpo_reward_keys=[acc,format]")
LOSS_SCALE_FACTOR = f"{ACTOR}.loss_scale_factor"
DRGRPO_LOSS = (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{LOSS_SCALE_FACTOR}=3000")
DRGRPO_WITH_LOSS = (DRGRPO, *DRGRPO_LOSS)
REWARD_PATH = "reward.custom_reward_function.path"
REWARD_KWARGS = "+reward.custom_reward_function.reward_kwargs"
GSM8K_REWARD = f"{REWARD_PATH}=pkg://verl_ext.rewards.gsm8k"
TOOL_CALLING_REWARD = f"{REWARD_PATH}=pkg://verl_ext.rewards.tool_calling"
KEYS_OF_GSM8K = "+algorithm.rewards.keys=[correctness,format]"
OVERLONG_PENALTY = ("reward.reward_manager.name=dapo", "+reward.reward_kwargs.overlong_buffer_cfg.enable=True")
PENALTY_IS_LOGGED = "+reward.reward_kwargs.overlong_buffer_cfg.log=True"
KEYS_WITH_PENALTY = "+algorithm.rewards.keys=[acc,overlong_reward]"
FILTER = "algorithm.filter_groups.enable=True"
ANY_REWARD = "algorithm.filter_groups.metric=any_reward"
ACCURACY_BETWEEN = "algorithm.filter_groups.metric=accuracy_between"
ACCURACY_BOUNDS = "+algorithm.rewards.accuracy_between=[0.05,0.95]"
REWARD_MODEL = "reward.reward_model.enable=True"
ACCURACY_IS_CORRECTNESS = "+algorithm.rewards.accuracy_key=correctness"
HADW_ON_GDPO = (HADW, "+algorithm.hadw.base=gdpo")
ACCURACY_IS_ACC = "+algorithm.rewards.accuracy_key=acc"
MAXRL = "algorithm.adv_estimator=maxrl"
CORRECTNESS_ONLY = "+algorithm.rewards.keys=[correctness]"
NO_STD = "algorithm.norm_adv_by_std_in_grpo=False"
RLOO = "algorithm.adv_estimator=rloo"
COMPOSE = "algorithm.adv_estimator=compose"
PER_TURN_FORMAT = "+algorithm.rewards.per_turn=[format]"
PER_TURN_TOOL_REWARDS = (
    "algorithm.rewards.keys=[acc,tool_rewards]",
    "+algorithm.rewards.per_turn=[tool_rewards]",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2",
)
RUBRIC_FORMAT = "+algorithm.rewards.rubrics=[format]"
RUBRIC_ACC = "+algorithm.rewards.rubrics=[acc]"
WEIGHTS = "+algorithm.rewards.weights=[1,2]"
HADW_ON_RVPO = (HADW, "+algorithm.hadw.base=rvpo", "+algorithm.rewards.accuracy_key=acc")
NEGATIVE_FORMAT = ("+algorithm.rewards.keys=[format]", "+algorithm.rewards.weights=[-1]")
SAW_MINIMA = "+algorithm.saw.min_values=[0,0]"
BATCH_STD_BEFORE_THE_SUM = "+algorithm.compose.steps=[divide_by_batch_std,weighted_sum,center]"
HADW_ON_GD2PO = (HADW, "+algorithm.hadw.base=gd2po")
DIVIDED_BY_MEAN = "+algorithm.compose.steps=[weighted_sum,divide_by_mean,center]"
NEGATIVE_WEIGHTS = "+algorithm.rewards.weights=[-2,-1]"
BATCH_STD_AFTER_THE_SUM = "+algorithm.compose.steps=[weighted_sum,divide_by_batch_std,center]"
ROLLOUT_REJECTION = "+algorithm.rollout_correction.rollout_rs=token_k1"
ADVANTAGE_HOOKS = "+trainer.pre_advantage_hooks={mine:{hook_class:my_package.Mine}}"
KL_IN_REWARD = "algorithm.use_kl_in_reward=True"
CUSTOM_SUM = "+algorithm.compose.steps=['tests.integration.custom_steps:Lowest',center]"
PER_TURN_ACC = "+algorithm.rewards.per_turn=[acc]"
CONDITIONS = "+algorithm.rewards.conditions={format:{reward:acc,at_least:1}}"
MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"
GPUS = "trainer.n_gpus_per_node"
ONE_RESPONSE = "actor_rollout_ref.rollout.n=1"
OWN_STEPS = "tests.integration.custom_steps"
SHORT_MICRO_BATCH = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=1000")
WARMUP = f"{ACTOR}.optim.lr_warmup_steps=10"
VAL_ONLY = "trainer.val_only=True"
VAL_ONLY_WITHOUT_EFFECT = (VAL_ONLY, "trainer.val_before_train=False")
"""verl reads `val_only` after the validation before training alone: this run trains."""

Case = tuple[str, tuple[str, ...], tuple[str, ...]]
"""A name, the overrides of the configuration, and facts of one of its findings."""

ERRORS: list[Case] = [
    ("section", (*GDPO_WITH_KEYS, "+algorithm.gdop.whiten=token"), ("algorithm.gdop", "algorithm.gdpo")),
    (
        "setting one level too high",
        (*GDPO_WITH_KEYS, "+algorithm.whiten=token"),
        ("algorithm.whiten", "algorithm.gdpo.whiten"),
    ),
    ("section at the top", (*GDPO_WITH_KEYS, "+gdpo.whiten=token"), ("algorithm.gdpo",)),
    ("preset as an entry", ("+verl_ex=gdpo", KEYS), ("verl_ex=gdpo", "+verl_ext=gdpo")),
    ("presets as an entry", ("+verl_etx=[cpu,gdpo]", KEYS), ("verl_etx", "+verl_ext=[cpu,gdpo]")),
    ("interpolation", (*GDPO_WITH_KEYS, "+algorithm.gdpo.epsilon=${nothing}"), ("algorithm.gdpo", "nothing")),
    (
        "verl's names",
        GDPO_BY_NAMES_OF_VERL,
        ("gdpo_reward_keys", "algorithm.gdpo.whiten=token", "algorithm.gdpo.whiten=sequence"),
    ),
    (
        "verl's weights below hadw",
        (*HADW_ON_GDPO, KEYS, "+algorithm.gdpo_reward_weights=[1,2]"),
        ("gdpo.whiten=token",),
    ),
    ("per-turn rewards under verl's grpo", (GRPO, KEYS, PER_TURN_FORMAT), ("algorithm.rewards.per_turn", "grpo")),
    (
        "per-turn rewards of calls",
        (*GDPO_WITH_KEYS, *PER_TURN_TOOL_REWARDS),
        ("tool_rewards", "max_parallel_calls=1", "per_turn([...])"),
    ),
    (
        "per-turn rewards and rejection",
        (*GDPO_WITH_KEYS, PER_TURN_FORMAT, ROLLOUT_REJECTION, "trainer.use_v1=False"),
        ("per_turn", "rollout_rs"),
    ),
    (
        "per-turn rewards and hooks",
        (*GDPO_WITH_KEYS, PER_TURN_FORMAT, ADVANTAGE_HOOKS, "trainer.use_v1=False"),
        ("per_turn", "pre_advantage_hooks"),
    ),
    (
        "per-turn rewards and any reward",
        (*GDPO_WITH_KEYS, PER_TURN_FORMAT, FILTER, ANY_REWARD),
        ("per_turn", "any_reward", "accuracy_between"),
    ),
    ("rubrics under verl's grpo", (GRPO, KEYS, RUBRIC_FORMAT), ("algorithm.rewards.rubrics", "grpo")),
    (
        "rubrics and any reward",
        (*GDPO_WITH_KEYS, RUBRIC_FORMAT, FILTER, ANY_REWARD),
        ("rubrics", "any_reward", "accuracy_between"),
    ),
    ("rubrics as the accuracy", (*HADW_ON_GDPO, KEYS, RUBRIC_ACC), ("rubrics", "'acc'", "rewards.accuracy_key")),
    ("rubrics that conflict", (GD2PO, KEYS, RUBRIC_FORMAT), ("rubrics", "drop_conflicts", "gd2po")),
    (
        "rubrics below hadw",
        (*HADW_ON_GD2PO, KEYS, RUBRIC_FORMAT, ACCURACY_IS_ACC),
        ("rubrics", "drop_conflicts", "hadw"),
    ),
    ("rubrics of saw", (SAW, SAW_MINIMA, KEYS, RUBRIC_FORMAT), ("rubrics", "weight_by_variation")),
    ("rubrics of dara", (DARA, KEYS, RUBRIC_FORMAT), ("rubrics", "weight_by_density")),
    ("rubrics by batch", (COMPOSE, KEYS, RUBRIC_FORMAT, BATCH_STD_BEFORE_THE_SUM), ("rubrics", "divide_by_batch_std")),
    ("weights of rvpo below hadw", (*HADW_ON_RVPO, KEYS, WEIGHTS), ("algorithm.rewards.weights",)),
    ("a negative weight of rvpo", (RVPO, *NEGATIVE_FORMAT), ("algorithm.rewards.weights",)),
    (
        "a list as the filter",
        (*GDPO_WITH_KEYS, RUBRIC_FORMAT, FILTER, "+algorithm.filter_groups.metric=format"),
        ("rubrics", "metric"),
    ),
    ("weights of rvpo", (RVPO, KEYS, WEIGHTS), ("algorithm.rewards.weights",)),
    (
        "per-turn rewards and KL",
        (*DRGRPO_WITH_LOSS, KEYS, PER_TURN_FORMAT, KL_IN_REWARD),
        ("use_kl_in_reward", "per_turn"),
    ),
    ("KL and a custom sum", (COMPOSE, CUSTOM_SUM, KEYS, KL_IN_REWARD), ("use_kl_in_reward", "weighted_sum")),
    (
        "per-turn rewards as the accuracy",
        (*HADW_ON_GDPO, KEYS, PER_TURN_ACC),
        ("per_turn", "'acc'", "rewards.accuracy_key"),
    ),
    ("no keys", (GDPO,), ("gdpo", "++algorithm.rewards.keys=[...]")),
    ("setting of rloo", (RLOO, "+algorithm.verl_ext.skip_zero_advantge=True"), ("'skip_zero_advantage'",)),
    ("section not in force", (*GDPO_WITH_KEYS, "+algorithm.dgpo.dqw_tmp=1"), ("algorithm.dgpo", "'dqw_temp'")),
    ("section with a setting", (RLOO, KEYS, "+algorithm.rewrds.log=all"), ("algorithm.rewrds", "algorithm.rewards")),
    ("component", (*GDPO_WITH_KEYS, GSM8K_REWARD), ("algorithm.rewards.keys", "'acc'", "'correctness'")),
    ("argument below grpo", (GRPO, GSM8K_REWARD, f"{REWARD_KWARGS}.strict=yes"), ("strict", "'yes'")),
    ("scorer", (*GDPO_WITH_KEYS, f"{REWARD_PATH}=pkg://verl_ext.rewards.gsm8"), ("'gsm8'", "'gsm8k'")),
    (
        "accuracy beyond [0, 1]",
        (HADW, KEYS_OF_GSM8K, TOOL_CALLING_REWARD, ACCURACY_IS_CORRECTNESS),
        ("'correctness'", "accuracy_threshold"),
    ),
    ("accuracy by default", (DGPO, GSM8K_REWARD), ("'score'", "accuracy_key", "correctness")),
    (
        "accuracy with a colocated reward model",
        (*HADW_ON_GDPO, CORRECTNESS_ONLY, REWARD_MODEL),
        ("reward_model", "rewards.accuracy_key"),
    ),
    ("accuracy of a sum", (HADW, KEYS_OF_GSM8K), ("hadw", "algorithm.rewards.accuracy_key")),
    ("accuracy of one key", (DGPO, TOOL_CALLING_REWARD, CORRECTNESS_ONLY), ("'correctness'", "accuracy_threshold")),
    (
        "lost penalty",
        (*GDPO_WITH_KEYS, *OVERLONG_PENALTY),
        ("overlong_buffer_cfg.enable", "overlong_reward", "log=True"),
    ),
    ("loss of drgrpo", (DRGRPO,), (DRGRPO_LOSS[0], f"{LOSS_SCALE_FACTOR}=", "check_loss")),
    ("no factor", (DRGRPO, DRGRPO_LOSS[0]), (f"{LOSS_SCALE_FACTOR}=512",)),
    ("factor as text", (DRGRPO, DRGRPO_LOSS[0], f"{LOSS_SCALE_FACTOR}='8'"), (f"{LOSS_SCALE_FACTOR}=512",)),
    (
        "loss with its own aggregation",
        (DRGRPO, *DRGRPO_LOSS, f"{ACTOR}.policy_loss.loss_mode=sapo"),
        ("loss_mode=sapo", "vanilla"),
    ),
    ("KL", (*GDPO_WITH_KEYS, KL_IN_REWARD), ("algorithm.use_kl_in_reward", "use_kl_loss")),
    ("std of the batch", (LITEPPO, NO_STD), ("divide_by_batch_std", "liteppo", "weighted_grpo")),
    ("std of a list", (COMPOSE, BATCH_STD_AFTER_THE_SUM, NO_STD), ("norm_adv_by_std_in_grpo", "divide_by_batch_std")),
    (
        "std against mad",
        (*GDPO_WITH_KEYS, "+algorithm.gdpo.scale=mad", NO_STD),
        ("norm_adv_by_std_in_grpo", "algorithm.gdpo.scale"),
    ),
    ("KL against maxrl", (MAXRL, KL_IN_REWARD), ("algorithm.use_kl_in_reward", "maxrl")),
    ("temperature", (DGPO, "+algorithm.dgpo={dqw: False, dqw_temp: 5}"), ("dqw_temp", "dqw")),
    ("conditions of verl's own", (GRPO, KEYS, CONDITIONS), ("algorithm.rewards.conditions", "grpo")),
    ("one response", (HADW, ONE_RESPONSE), ("rollout.n=1",)),
    ("one response, not only validated", (HADW, ONE_RESPONSE, *VAL_ONLY_WITHOUT_EFFECT), ("rollout.n=1",)),
    ("no keys, only validated", (GDPO, VAL_ONLY), ("algorithm.rewards.keys",)),
    *(
        (f"one by {step}", (COMPOSE, f"+algorithm.compose.steps=[weighted_sum,{step}]", ONE_RESPONSE), ("rollout.n=1",))
        for step in ("divide_by_mean", f"{OWN_STEPS}:Middle")
    ),
    ("step", (COMPOSE, f"+algorithm.compose.steps=[weighted_sum,{OWN_STEPS}:Broken]"), ("KeyError", "custom_steps.py")),
    ("filter elsewhere", (*GDPO_WITH_KEYS, FILTER, ANY_REWARD, "trainer.use_v1=False"), ("trainer.use_v1",)),
    ("filter without bounds", (GRPO, FILTER, ACCURACY_BETWEEN), ("accuracy_between",)),
    ("filter without an accuracy", (GRPO, FILTER, ACCURACY_BETWEEN, ACCURACY_BOUNDS), ("rewards.accuracy_key",)),
    (
        "bounds of grpo",
        (GRPO, FILTER, ACCURACY_BETWEEN, ACCURACY_IS_ACC, "+algorithm.rewards.accuracy_between=[5]"),
        ("accuracy_between",),
    ),
    ("negative weight of maxrl", (MAXRL, KEYS, "+algorithm.rewards.weights=[2,-1]"), ("maxrl", "weights")),
    ("negative weights of maxrl", (MAXRL, KEYS, NEGATIVE_WEIGHTS), ("maxrl", "weights")),
    ("negative weights of a list", (COMPOSE, DIVIDED_BY_MEAN, KEYS, NEGATIVE_WEIGHTS), ("compose", "weights")),
    (
        "penalty of a list",
        (COMPOSE, DIVIDED_BY_MEAN, *OVERLONG_PENALTY),
        ("compose", "overlong_buffer_cfg.enable=False"),
    ),
    ("penalty of maxrl", (MAXRL, *OVERLONG_PENALTY), ("maxrl", "overlong_buffer_cfg.enable=False")),
    (
        "bounds without the filter",
        (*GDPO_WITH_KEYS, ACCURACY_BETWEEN, ACCURACY_BOUNDS),
        ("accuracy_between", "filter_groups.enable=True"),
    ),
    (
        "a mini-batch that the ranks cannot share",
        (*GDPO_WITH_KEYS, f"{MINI_BATCH}=4", f"{GPUS}=6"),
        (f"{MINI_BATCH}=6", "32", "6"),
    ),
    (
        "a mini-batch that pairs of ranks cannot share",
        (*GDPO_WITH_KEYS, f"{MINI_BATCH}=4", f"{GPUS}=6", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"),
        (f"{MINI_BATCH}=6", "32", "3"),
    ),
    (
        "a mini-batch of the critic",
        (*GDPO_WITH_KEYS, f"{MINI_BATCH}=6", f"{GPUS}=6", "critic.enable=True", "critic.ppo_mini_batch_size=4"),
        ("critic.ppo_mini_batch_size=6",),
    ),
    (
        "a mini-batch for the GPUs of two nodes",
        (*GDPO_WITH_KEYS, f"{MINI_BATCH}=3", f"{GPUS}=8", "trainer.nnodes=2"),
        (f"{MINI_BATCH}=4",),
    ),
    (
        "bounds elsewhere",
        (GRPO, KEYS, FILTER, ACCURACY_BETWEEN, ACCURACY_BOUNDS, ACCURACY_IS_ACC, "trainer.use_v1=False"),
        ("trainer.use_v1", "remove algorithm.rewards.accuracy_between"),
    ),
    (
        "a list as the accuracy and any reward",
        (*GDPO_WITH_KEYS, PER_TURN_FORMAT, FILTER, ANY_REWARD, "+algorithm.rewards.accuracy_key=format"),
        ("any_reward", "accuracy_key=NAME"),
    ),
    ("penalty named but not logged", (GDPO, KEYS_WITH_PENALTY, *OVERLONG_PENALTY), ("overlong_buffer_cfg.log=True",)),
    (
        "lost penalty of a list",
        (COMPOSE, DIVIDED_BY_MEAN, KEYS, *OVERLONG_PENALTY),
        ("would be lost", "overlong_buffer_cfg.enable=False"),
    ),
    (
        "std below hadw",
        (*HADW_ON_GDPO, KEYS, ACCURACY_IS_ACC, "+algorithm.gdpo.scale=mad", NO_STD),
        ("algorithm.gdpo.scale=none",),
    ),
    (
        "bounds in descending order",
        (*GDPO_WITH_KEYS, "+algorithm.rewards.accuracy_between=[0.9,0.1]"),
        ("accuracy_between",),
    ),
]
WARNINGS: list[Case] = [
    ("settings of grpo", (GRPO, "+algorithm.rewards.keyz=[a]"), ("'keyz'", "'keys'")),
    ("section of rloo", (RLOO, "+algorithm.dgpo.dqw_tmp=1"), ("algorithm.dgpo", "'dqw_temp'")),
    ("weights of verl's PF-PPO", (*GDPO_WITH_KEYS, "algorithm.use_pf_ppo=True"), ("use_pf_ppo=False", "gdpo")),
    ("PF-PPO on the default trainer", ("algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=True"), ("use_v1",)),
    ("rejected rows of grpo", (GRPO, KEYS, "+algorithm.rewards.rejected=exclude"), ("rewards.rejected", "grpo")),
    ("estimator", ("algorithm.adv_estimator=gdop",), ("adv_estimator", "'gdop'", "'gdpo'", "'rloo'")),
    ("estimator registered elsewhere", ("algorithm.adv_estimator=mine",), ("'mine'", "VERL_USE_EXTERNAL_MODULES")),
    ("estimator named as verl's", ("algorithm.adv_estimator=grpo2",), ("'grpo2'", "VERL_USE_EXTERNAL_MODULES")),
    ("something like a setting", (*GDPO_WITH_KEYS, "+algorithm.scales=[1]"), ("algorithm.scales", "gdpo.scale")),
    ("a short word", (*GDPO_WITH_KEYS, "+algorithm.data.x=1"), ("algorithm.data",)),
    ("something shorter", (*GDPO_WITH_KEYS, "+algorithm.key=a"), ("algorithm.key", "rewards.keys")),
    ("section of another", (*GDPO_WITH_KEYS, "+algorithm.dgpo.dqw_temp=5"), ("algorithm.dgpo", "adv_estimator=dgpo")),
    ("dump of grpo", (GRPO, "+algorithm.verl_ext.dump_dir=/tmp/x"), ("dump_dir", "keys")),
    ("filter by the total", (*GDPO_WITH_KEYS, FILTER, "algorithm.filter_groups.metric=reward"), ("metric=any_reward",)),
    ("balance", (DGPO, "+algorithm.dgpo.balance=sequence"), ("token-mean", "balance=auto")),
    (
        "balance by a loss with its own aggregation",
        (DGPO, f"{ACTOR}.policy_loss.loss_mode=sapo"),
        ("loss_mode=sapo", "balance=sequence"),
    ),
    (
        "std of verl's gdpo",
        (*GDPO_BY_NAMES_OF_VERL, "+algorithm.gdpo.whiten=token", NO_STD),
        ("norm_adv_by_std_in_grpo",),
    ),
    (
        "filter by the total with turns",
        (*GDPO_WITH_KEYS, PER_TURN_FORMAT, FILTER, "algorithm.filter_groups.metric=reward"),
        ("metric=accuracy_between",),
    ),
    (
        "balance of a list",
        (
            COMPOSE,
            KEYS,
            ACCURACY_IS_ACC,
            "+algorithm.compose.steps=[weighted_sum,center,{step: balance, over: sequence}]",
        ),
        ("{step: balance, over: token}",),
    ),
    ("greedy responses", (GRPO, "actor_rollout_ref.rollout.temperature=0"), ("8", "rollout.temperature=1")),
    ("top_k=1", (GRPO, "actor_rollout_ref.rollout.top_k=1"), ("rollout.top_k=1", "8", "rollout.top_k=-1")),
    *(
        (f"{part} {kept}", (GRPO, f"{ACTOR}.checkpoint.{part}=[{kept}]"), (f"{part}=['{kept}']", *lost))
        for part in ("save_contents", "load_contents")
        for kept, lost in (("model", ("optimizer",)), ("hf_model", ("model", "optimizer")), ("optimizer", ("model",)))
    ),
    (
        "a model that is not read before it is validated",
        (GRPO, VAL_ONLY, f"{ACTOR}.checkpoint.load_contents=[optimizer]"),
        ("load_contents=['optimizer']", "'model'"),
    ),
    ("KL loss of drgrpo", (DRGRPO, *DRGRPO_LOSS, f"{ACTOR}.use_kl_loss=True"), ("use_kl_loss",)),
    *(
        (f"one of {name}", (f"algorithm.adv_estimator={name}", ONE_RESPONSE), ("rollout.n=1", name, effect, "n=8"))
        for name, effect in estimators.WITH_ONE_RESPONSE.items()
    ),
    ("a warm-up without an end", (GRPO, WARMUP, "trainer.total_training_steps=10"), ("lr_warmup_steps=1",)),
    (
        "a short micro-batch",
        (GRPO, *SHORT_MICRO_BATCH),
        ("ppo_max_token_len_per_gpu=1000", "ppo_max_token_len_per_gpu=1024"),
    ),
    ("trained and validated", (GRPO, "data.train_files=[a,b]", "data.val_files=b"), ("'b'", "data.val_files")),
]
ACCEPTED: dict[str, tuple[str, ...]] = {
    "maxrl with a format": (MAXRL, TOOL_CALLING_REWARD, "+algorithm.rewards.keys=[format]"),
    "maxrl with its scorer": (MAXRL, GSM8K_REWARD),
    "dgpo with one key": (DGPO, GSM8K_REWARD, CORRECTNESS_ONLY),
    "per-turn rewards and hooks on the default trainer": (*GDPO_WITH_KEYS, PER_TURN_FORMAT, ADVANTAGE_HOOKS),
    "rubrics": (*GDPO_WITH_KEYS, RUBRIC_FORMAT),
    "rubrics, divided by a std after the sum": (COMPOSE, KEYS, RUBRIC_FORMAT, BATCH_STD_AFTER_THE_SUM),
    "hooks on the other trainer": (*GDPO_WITH_KEYS, ADVANTAGE_HOOKS, "trainer.use_v1=False"),
    "gdpo by verl's names": (*GDPO_BY_NAMES_OF_VERL, "+algorithm.gdpo.whiten=token"),
    "drgrpo by verl's names": (DRGRPO, *DRGRPO_LOSS, GDPO_BY_NAMES_OF_VERL[1]),
    "gdpo with its scorer": (GDPO, KEYS_OF_GSM8K, GSM8K_REWARD),
    "gdpo with dapo's penalty": (GDPO, KEYS_WITH_PENALTY, *OVERLONG_PENALTY, PENALTY_IS_LOGGED),
    "hadw": (HADW,),
    "hadw with a named accuracy": (HADW, KEYS_OF_GSM8K, GSM8K_REWARD, ACCURACY_IS_CORRECTNESS),
    "dgpo with a threshold": (
        *(DGPO, KEYS_OF_GSM8K, TOOL_CALLING_REWARD, ACCURACY_IS_CORRECTNESS, "+algorithm.rewards.accuracy_threshold=0"),
    ),
    "another loss of drgrpo": (*(DRGRPO, "+algorithm.drgrpo.check_loss=False", f"{ACTOR}.use_kl_loss=True"),),
    "KL of one combined reward": (DRGRPO, *DRGRPO_LOSS, KL_IN_REWARD),
    "the center of a list without std": (COMPOSE, "+algorithm.compose.steps=[weighted_sum,center]", NO_STD),
    "a preset with another": ("+verl_ext=[cpu,hadw]",),
    "grpo with logged rewards": (GRPO, KEYS_OF_GSM8K, GSM8K_REWARD),
    "any_reward": (GDPO, "+algorithm.rewards.keys=[acc]", FILTER, ANY_REWARD),
    "accuracy_between": (*GDPO_WITH_KEYS, FILTER, ACCURACY_BETWEEN, ACCURACY_BOUNDS, ACCURACY_IS_ACC),
    "a reward function of the user": (
        *GDPO_WITH_KEYS,
        f"{REWARD_PATH}=pkg://somebody.rewards",
        f"{REWARD_KWARGS}.maching=x",
    ),
    "one response that is distilled": (GRPO, ONE_RESPONSE, "distillation.enabled=True"),
    "one response of remax": ("algorithm.adv_estimator=remax", ONE_RESPONSE),
    "a warm-up with an end": (GRPO, WARMUP, "trainer.total_training_steps=11"),
    "a short micro-batch on two ranks": (GRPO, *SHORT_MICRO_BATCH, f"{ACTOR}.ulysses_sequence_parallel_size=2"),
    "a mini-batch that pairs of ranks can share": (
        *(*GDPO_WITH_KEYS, f"{MINI_BATCH}=3", f"{GPUS}=12", f"{ACTOR}.ulysses_sequence_parallel_size=2"),
    ),
    "a mini-batch of a critic that is not used": (
        *GDPO_WITH_KEYS,
        "critic.ppo_mini_batch_size=4",
        f"{MINI_BATCH}=6",
        f"{GPUS}=6",
    ),
    "a mini-batch of another engine": (*GDPO_WITH_KEYS, f"{MINI_BATCH}=4", f"{GPUS}=6", f"{ACTOR}.strategy=megatron"),
    "base of hadw": (*HADW_ON_GDPO, KEYS, ACCURACY_IS_ACC, "+algorithm.gdpo.whiten=token"),
    "dump with keys": (GRPO, KEYS, "+algorithm.verl_ext.dump_dir=/tmp/x"),
    "tool_rewards": (GDPO, "+algorithm.rewards.keys=[correctness,tool_rewards]", GSM8K_REWARD),
    "a model with GPUs of its own": (
        *HADW_ON_GDPO,
        CORRECTNESS_ONLY,
        REWARD_MODEL,
        "reward.reward_model.enable_resource_pool=True",
    ),
    "other names of a model": (*GDPO_WITH_KEYS, GSM8K_REWARD, REWARD_MODEL),
    "one greedy response": (
        *(GRPO, KEYS, ONE_RESPONSE, "actor_rollout_ref.rollout.temperature=0", "distillation.enabled=True"),
    ),
    "a mini-batch that is only validated": (*GDPO_WITH_KEYS, VAL_ONLY, f"{MINI_BATCH}=4", f"{GPUS}=6"),
    "a warm-up with several updates per step": (
        *(GRPO, KEYS, WARMUP, "trainer.total_training_steps=10", "trainer.v1.trainer_mode=separate_async"),
        "trainer.v1.separate_async.parameter_sync_step=2",
    ),
    "a micro-batch of one sequence": (GRPO, KEYS, SHORT_MICRO_BATCH[0], f"{ACTOR}.ppo_max_token_len_per_gpu=1024"),
    "a reward function of verl_ext on an experimental trainer": (GRPO, GSM8K_REWARD, "+rollout.n=1"),
    "nothing validated": (
        *(GRPO, "data.train_files=a", "data.val_files=a", "trainer.test_freq=-1", "trainer.val_before_train=False"),
    ),
    **{
        f"{name}, only validated": (*given, VAL_ONLY)
        for name, given in {
            "one response": (HADW, ONE_RESPONSE),
            "one response of grpo": (GRPO, KEYS, ONE_RESPONSE),
            "a short micro-batch": (GRPO, KEYS, *SHORT_MICRO_BATCH),
            "a warm-up without an end": (GRPO, KEYS, WARMUP, "trainer.total_training_steps=10"),
            "greedy responses": (GRPO, KEYS, "actor_rollout_ref.rollout.temperature=0"),
            "a file": (GRPO, KEYS, "data.train_files=a", "data.val_files=a"),
        }.items()
    },
    "a file of the same name": (*GDPO_WITH_KEYS, f"{REWARD_PATH}=/nowhere/gsm8k.py", f"{REWARD_KWARGS}.strict=yes"),
}
