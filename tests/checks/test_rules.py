"""The rules for a run's configuration, one table: what is rejected or warned of, and the facts of its message."""

import re
from types import SimpleNamespace

import pytest

import verl_ext
from tests.checks.fixes import ways, without
from tests.checks.test_presets import judged
from tests.configs import compose as composed_by_hydra
from tests.configs import compose_quickly as compose
from tests.facts import says
from verl_ext import hooks
from verl_ext.checks import estimators, losses
from verl_ext.checks.judge import check_run, judge, log_run
from verl_ext.errors import ConfigurationError, Finding, IntegrationError

ACTOR = "actor_rollout_ref.actor"
KEYS = "+algorithm.rewards.keys=[acc,format]"
GRPO = "algorithm.adv_estimator=grpo"
GDPO = ("algorithm.adv_estimator=gdpo", KEYS)
VERLS = ("algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[acc,format]")
FACTOR = f"{ACTOR}.loss_scale_factor"
DRGRPO = (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{FACTOR}=3000")
DRGRPO_RUN = ("algorithm.adv_estimator=drgrpo", *DRGRPO)
PATH = "reward.custom_reward_function.path"
KWARGS = "+reward.custom_reward_function.reward_kwargs"
GSM8K, TOOLS = (f"{PATH}=pkg://verl_ext.rewards.{name}" for name in ("gsm8k", "tool_calling"))
TWO = "+algorithm.rewards.keys=[correctness,format]"
DAPO = ("reward.reward_manager.name=dapo", "+reward.reward_kwargs.overlong_buffer_cfg.enable=True")
LOGGED = "+reward.reward_kwargs.overlong_buffer_cfg.log=True"
OVERLONG = "+algorithm.rewards.keys=[acc,overlong_reward]"
FILTER = "algorithm.filter_groups.enable=True"
ANY_REWARD = "algorithm.filter_groups.metric=any_reward"
BETWEEN = "algorithm.filter_groups.metric=accuracy_between"
BOUNDS = "+algorithm.rewards.accuracy_between=[0.05,0.95]"
MODEL = "reward.reward_model.enable=True"
NAMED = "+algorithm.rewards.accuracy_key=correctness"
HADW_GDPO = ("algorithm.adv_estimator=hadw", "+algorithm.hadw.base=gdpo")
ACC = "+algorithm.rewards.accuracy_key=acc"
MAXRL = "algorithm.adv_estimator=maxrl"
ONE = "+algorithm.rewards.keys=[correctness]"
STD = "algorithm.norm_adv_by_std_in_grpo=False"
RLOO = "algorithm.adv_estimator=rloo"
COMPOSE = "algorithm.adv_estimator=compose"
TURNS = "+algorithm.rewards.per_turn=[format]"
CALLS = (
    "algorithm.rewards.keys=[acc,tool_rewards]",
    "+algorithm.rewards.per_turn=[tool_rewards]",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2",
)
ITEMS = "+algorithm.rewards.rubrics=[format]"
ITEMS_ACC = "+algorithm.rewards.rubrics=[acc]"
WEIGHTS = "+algorithm.rewards.weights=[1,2]"
HADW_RVPO = ("algorithm.adv_estimator=hadw", "+algorithm.hadw.base=rvpo", "+algorithm.rewards.accuracy_key=acc")
PENALTY = ("+algorithm.rewards.keys=[format]", "+algorithm.rewards.weights=[-1]")
SAW = "+algorithm.saw.min_values=[0,0]"
BY_BATCH = "+algorithm.compose.steps=[divide_by_batch_std,weighted_sum,center]"
HADW_GD2PO = ("algorithm.adv_estimator=hadw", "+algorithm.hadw.base=gd2po")
BY_MEAN = "+algorithm.compose.steps=[weighted_sum,divide_by_mean,center]"
NEGATIVE = "+algorithm.rewards.weights=[-2,-1]"
BATCH_STD = "+algorithm.compose.steps=[weighted_sum,divide_by_batch_std,center]"
REJECTING = "+algorithm.rollout_correction.rollout_rs=token_k1"
HOOKS = "+trainer.pre_advantage_hooks={mine:{hook_class:my_package.Mine}}"
KL_REWARD = "algorithm.use_kl_in_reward=True"
OWN_SUM = "+algorithm.compose.steps=['tests.integration.custom_steps:Lowest',center]"
ACCURACY_BY_TURN = "+algorithm.rewards.per_turn=[acc]"
CONDITIONS = "+algorithm.rewards.conditions={format:{reward:acc,at_least:1}}"
MINI, GPUS = f"{ACTOR}.ppo_mini_batch_size", "trainer.n_gpus_per_node"
SINGLE = "actor_rollout_ref.rollout.n=1"
OWN = "tests.integration.custom_steps"
SHORT = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=1000")
WARMUP = f"{ACTOR}.optim.lr_warmup_steps=10"
VAL_ONLY = "trainer.val_only=True"
TRAINS = (VAL_ONLY, "trainer.val_before_train=False")
"""verl reads `val_only` after the validation before training alone: this run trains."""

# Overrides, with the estimator first where it has no name, and the facts of one message.
ERRORS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("section", (*GDPO, "+algorithm.gdop.whiten=token"), ("algorithm.gdop", "algorithm.gdpo")),
    ("setting one level too high", (*GDPO, "+algorithm.whiten=token"), ("algorithm.whiten", "algorithm.gdpo.whiten")),
    ("section at the top", (*GDPO, "+gdpo.whiten=token"), ("algorithm.gdpo",)),
    ("preset as an entry", ("+verl_ex=gdpo", KEYS), ("verl_ex=gdpo", "+verl_ext=gdpo")),
    ("presets as an entry", ("+verl_etx=[cpu,gdpo]", KEYS), ("verl_etx", "+verl_ext=[cpu,gdpo]")),
    ("interpolation", (*GDPO, "+algorithm.gdpo.epsilon=${nothing}"), ("algorithm.gdpo", "nothing")),
    ("verl's names", VERLS, ("gdpo_reward_keys", "algorithm.gdpo.whiten=token", "algorithm.gdpo.whiten=sequence")),
    ("verl's weights below hadw", (*HADW_GDPO, KEYS, "+algorithm.gdpo_reward_weights=[1,2]"), ("gdpo.whiten=token",)),
    ("turns under verl's grpo", (GRPO, KEYS, TURNS), ("algorithm.rewards.per_turn", "grpo")),
    ("turns of calls", (*GDPO, *CALLS), ("tool_rewards", "max_parallel_calls=1", "per_turn([...])")),
    ("turns and rejection", (*GDPO, TURNS, REJECTING, "trainer.use_v1=False"), ("per_turn", "rollout_rs")),
    ("turns and hooks", (*GDPO, TURNS, HOOKS, "trainer.use_v1=False"), ("per_turn", "pre_advantage_hooks")),
    ("turns and any reward", (*GDPO, TURNS, FILTER, ANY_REWARD), ("per_turn", "any_reward", "accuracy_between")),
    ("items under verl's grpo", (GRPO, KEYS, ITEMS), ("algorithm.rewards.rubrics", "grpo")),
    ("items and any reward", (*GDPO, ITEMS, FILTER, ANY_REWARD), ("rubrics", "any_reward", "accuracy_between")),
    ("items as the accuracy", (*HADW_GDPO, KEYS, ITEMS_ACC), ("rubrics", "'acc'", "rewards.accuracy_key")),
    ("items that conflict", ("algorithm.adv_estimator=gd2po", KEYS, ITEMS), ("rubrics", "drop_conflicts", "gd2po")),
    ("items below hadw", (*HADW_GD2PO, KEYS, ITEMS, ACC), ("rubrics", "drop_conflicts", "hadw")),
    ("items of saw", ("algorithm.adv_estimator=saw", SAW, KEYS, ITEMS), ("rubrics", "weight_by_variation")),
    ("items of dara", ("algorithm.adv_estimator=dara", KEYS, ITEMS), ("rubrics", "weight_by_density")),
    ("items by batch", (COMPOSE, KEYS, ITEMS, BY_BATCH), ("rubrics", "divide_by_batch_std")),
    ("weights of rvpo below hadw", (*HADW_RVPO, KEYS, WEIGHTS), ("algorithm.rewards.weights",)),
    ("a negative weight of rvpo", ("algorithm.adv_estimator=rvpo", *PENALTY), ("algorithm.rewards.weights",)),
    ("a list as the filter", (*GDPO, ITEMS, FILTER, "+algorithm.filter_groups.metric=format"), ("rubrics", "metric")),
    ("weights of rvpo", ("algorithm.adv_estimator=rvpo", KEYS, WEIGHTS), ("algorithm.rewards.weights",)),
    ("turns and KL", (*DRGRPO_RUN, KEYS, TURNS, KL_REWARD), ("use_kl_in_reward", "per_turn")),
    ("KL and a sum of one's own", (COMPOSE, OWN_SUM, KEYS, KL_REWARD), ("use_kl_in_reward", "weighted_sum")),
    ("turns as the accuracy", (*HADW_GDPO, KEYS, ACCURACY_BY_TURN), ("per_turn", "'acc'", "rewards.accuracy_key")),
    ("no keys", ("algorithm.adv_estimator=gdpo",), ("gdpo", "++algorithm.rewards.keys=[...]")),
    ("setting of rloo", (RLOO, "+algorithm.verl_ext.skip_zero_advantge=True"), ("'skip_zero_advantage'",)),
    ("section not in force", (*GDPO, "+algorithm.dgpo.dqw_tmp=1"), ("algorithm.dgpo", "'dqw_temp'")),
    ("section beside a setting", (RLOO, KEYS, "+algorithm.rewrds.log=all"), ("algorithm.rewrds", "algorithm.rewards")),
    ("component", (*GDPO, GSM8K), ("algorithm.rewards.keys", "'acc'", "'correctness'")),
    ("argument below grpo", (GRPO, GSM8K, f"{KWARGS}.strict=yes"), ("strict", "'yes'")),
    ("scorer", (*GDPO, f"{PATH}=pkg://verl_ext.rewards.gsm8"), ("'gsm8'", "'gsm8k'")),
    (
        "accuracy beyond [0, 1]",
        ("algorithm.adv_estimator=hadw", TWO, TOOLS, NAMED),
        ("'correctness'", "accuracy_threshold"),
    ),
    ("accuracy by default", ("algorithm.adv_estimator=dgpo", GSM8K), ("'score'", "accuracy_key", "correctness")),
    ("accuracy beside a colocated reward model", (*HADW_GDPO, ONE, MODEL), ("reward_model", "rewards.accuracy_key")),
    ("accuracy of a sum", ("algorithm.adv_estimator=hadw", TWO), ("hadw", "algorithm.rewards.accuracy_key")),
    ("accuracy of one key", ("algorithm.adv_estimator=dgpo", TOOLS, ONE), ("'correctness'", "accuracy_threshold")),
    ("lost penalty", (*GDPO, *DAPO), ("overlong_buffer_cfg.enable", "overlong_reward", "log=True")),
    ("loss of drgrpo", ("algorithm.adv_estimator=drgrpo",), (DRGRPO[0], f"{FACTOR}=", "check_loss")),
    ("no factor", ("algorithm.adv_estimator=drgrpo", DRGRPO[0]), (f"{FACTOR}=512",)),
    ("factor as text", ("algorithm.adv_estimator=drgrpo", DRGRPO[0], f"{FACTOR}='8'"), (f"{FACTOR}=512",)),
    (
        "loss that goes its own way",
        ("algorithm.adv_estimator=drgrpo", *DRGRPO, f"{ACTOR}.policy_loss.loss_mode=sapo"),
        ("loss_mode=sapo", "vanilla"),
    ),
    ("KL", (*GDPO, "algorithm.use_kl_in_reward=True"), ("algorithm.use_kl_in_reward", "use_kl_loss")),
    ("std of the batch", ("algorithm.adv_estimator=liteppo", STD), ("divide_by_batch_std", "liteppo", "weighted_grpo")),
    ("std of a list", (COMPOSE, BATCH_STD, STD), ("norm_adv_by_std_in_grpo", "divide_by_batch_std")),
    ("std against mad", (*GDPO, "+algorithm.gdpo.scale=mad", STD), ("norm_adv_by_std_in_grpo", "algorithm.gdpo.scale")),
    ("KL against maxrl", (MAXRL, "algorithm.use_kl_in_reward=True"), ("algorithm.use_kl_in_reward", "maxrl")),
    ("temperature", ("algorithm.adv_estimator=dgpo", "+algorithm.dgpo={dqw: False, dqw_temp: 5}"), ("dqw_temp", "dqw")),
    ("conditions of verl's own", (GRPO, KEYS, CONDITIONS), ("algorithm.rewards.conditions", "grpo")),
    ("one response", ("algorithm.adv_estimator=hadw", "actor_rollout_ref.rollout.n=1"), ("rollout.n=1",)),
    ("one response, not only validated", ("algorithm.adv_estimator=hadw", SINGLE, *TRAINS), ("rollout.n=1",)),
    ("no keys, only validated", ("algorithm.adv_estimator=gdpo", VAL_ONLY), ("algorithm.rewards.keys",)),
    *(
        (f"one by {step}", (COMPOSE, f"+algorithm.compose.steps=[weighted_sum,{step}]", SINGLE), ("rollout.n=1",))
        for step in ("divide_by_mean", f"{OWN}:Middle")
    ),
    ("step", (COMPOSE, f"+algorithm.compose.steps=[weighted_sum,{OWN}:Broken]"), ("KeyError", "custom_steps.py")),
    ("filter elsewhere", (*GDPO, FILTER, ANY_REWARD, "trainer.use_v1=False"), ("trainer.use_v1",)),
    ("filter without bounds", (GRPO, FILTER, BETWEEN), ("accuracy_between",)),
    ("filter without an accuracy", (GRPO, FILTER, BETWEEN, BOUNDS), ("rewards.accuracy_key",)),
    ("bounds of grpo", (GRPO, FILTER, BETWEEN, ACC, "+algorithm.rewards.accuracy_between=[5]"), ("accuracy_between",)),
    ("negative weight of maxrl", (MAXRL, KEYS, "+algorithm.rewards.weights=[2,-1]"), ("maxrl", "weights")),
    ("negative weights of maxrl", (MAXRL, KEYS, NEGATIVE), ("maxrl", "weights")),
    ("negative weights of a list", (COMPOSE, BY_MEAN, KEYS, NEGATIVE), ("compose", "weights")),
    ("penalty of a list", (COMPOSE, BY_MEAN, *DAPO), ("compose", "overlong_buffer_cfg.enable=False")),
    ("penalty of maxrl", (MAXRL, *DAPO), ("maxrl", "overlong_buffer_cfg.enable=False")),
    ("bounds without the filter", (*GDPO, BETWEEN, BOUNDS), ("accuracy_between", "filter_groups.enable=True")),
    ("a mini-batch that the ranks cannot share", (*GDPO, f"{MINI}=4", f"{GPUS}=6"), (f"{MINI}=6", "32", "6")),
    (
        "a mini-batch that pairs of ranks cannot share",
        (*GDPO, f"{MINI}=4", f"{GPUS}=6", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"),
        (f"{MINI}=6", "32", "3"),
    ),
    (
        "a mini-batch of the critic",
        (*GDPO, f"{MINI}=6", f"{GPUS}=6", "critic.enable=True", "critic.ppo_mini_batch_size=4"),
        ("critic.ppo_mini_batch_size=6",),
    ),
    ("a mini-batch for the GPUs of two nodes", (*GDPO, f"{MINI}=3", f"{GPUS}=8", "trainer.nnodes=2"), (f"{MINI}=4",)),
    (
        "bounds elsewhere",
        (GRPO, KEYS, FILTER, BETWEEN, BOUNDS, ACC, "trainer.use_v1=False"),
        ("trainer.use_v1", "remove algorithm.rewards.accuracy_between"),
    ),
    (
        "a list as the accuracy and any reward",
        (*GDPO, TURNS, FILTER, ANY_REWARD, "+algorithm.rewards.accuracy_key=format"),
        ("any_reward", "accuracy_key=NAME"),
    ),
    ("penalty named but not logged", (*GDPO[:1], OVERLONG, *DAPO), ("overlong_buffer_cfg.log=True",)),
    ("lost penalty of a list", (COMPOSE, BY_MEAN, KEYS, *DAPO), ("would be lost", "overlong_buffer_cfg.enable=False")),
    ("std below hadw", (*HADW_GDPO, KEYS, ACC, "+algorithm.gdpo.scale=mad", STD), ("algorithm.gdpo.scale=none",)),
    ("bounds the wrong way round", (*GDPO, "+algorithm.rewards.accuracy_between=[0.9,0.1]"), ("accuracy_between",)),
]  # fmt: skip
WARNINGS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("settings of grpo", (GRPO, "+algorithm.rewards.keyz=[a]"), ("'keyz'", "'keys'")),
    ("section of rloo", (RLOO, "+algorithm.dgpo.dqw_tmp=1"), ("algorithm.dgpo", "'dqw_temp'")),
    ("weights of verl's PF-PPO", (*GDPO, "algorithm.use_pf_ppo=True"), ("use_pf_ppo=False", "gdpo")),
    ("PF-PPO on the default trainer", ("algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=True"), ("use_v1",)),
    ("rejected rows of grpo", (GRPO, KEYS, "+algorithm.rewards.rejected=exclude"), ("rewards.rejected", "grpo")),
    ("estimator", ("algorithm.adv_estimator=gdop",), ("adv_estimator", "'gdop'", "'gdpo'", "'rloo'")),
    ("estimator registered elsewhere", ("algorithm.adv_estimator=mine",), ("'mine'", "VERL_USE_EXTERNAL_MODULES")),
    ("estimator named as verl's", ("algorithm.adv_estimator=grpo2",), ("'grpo2'", "VERL_USE_EXTERNAL_MODULES")),
    ("something like a setting", (*GDPO, "+algorithm.scales=[1]"), ("algorithm.scales", "gdpo.scale")),
    ("a short word", (*GDPO, "+algorithm.data.x=1"), ("algorithm.data",)),
    ("something shorter", (*GDPO, "+algorithm.key=a"), ("algorithm.key", "rewards.keys")),
    ("section of another", (*GDPO, "+algorithm.dgpo.dqw_temp=5"), ("algorithm.dgpo", "adv_estimator=dgpo")),
    ("dump of grpo", (GRPO, "+algorithm.verl_ext.dump_dir=/tmp/x"), ("dump_dir", "keys")),
    ("filter by the total", (*GDPO, FILTER, "algorithm.filter_groups.metric=reward"), ("metric=any_reward",)),
    ("balance", ("algorithm.adv_estimator=dgpo", "+algorithm.dgpo.balance=sequence"), ("token-mean", "balance=auto")),
    (
        "balance by a loss that goes its own way",
        ("algorithm.adv_estimator=dgpo", f"{ACTOR}.policy_loss.loss_mode=sapo"),
        ("loss_mode=sapo", "balance=sequence"),
    ),
    ("std of verl's gdpo", (*VERLS, "+algorithm.gdpo.whiten=token", STD), ("norm_adv_by_std_in_grpo",)),
    (
        "filter by the total with turns",
        (*GDPO, TURNS, FILTER, "algorithm.filter_groups.metric=reward"),
        ("metric=accuracy_between",),
    ),
    (
        "balance of a list",
        (COMPOSE, KEYS, ACC, "+algorithm.compose.steps=[weighted_sum,center,{step: balance, over: sequence}]"),
        ("{step: balance, over: token}",),
    ),
    ("greedy answers", (GRPO, "actor_rollout_ref.rollout.temperature=0"), ("8", "rollout.temperature=1")),
    ("the best token", (GRPO, "actor_rollout_ref.rollout.top_k=1"), ("rollout.top_k=1", "8", "rollout.top_k=-1")),
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
    ("KL loss of drgrpo", ("algorithm.adv_estimator=drgrpo", *DRGRPO, f"{ACTOR}.use_kl_loss=True"), ("use_kl_loss",)),
    *(
        (f"one of {name}", (f"algorithm.adv_estimator={name}", SINGLE), ("rollout.n=1", name, effect, "n=8"))
        for name, effect in estimators.WITH_ONE_RESPONSE.items()
    ),
    ("a warm-up without an end", (GRPO, WARMUP, "trainer.total_training_steps=10"), ("lr_warmup_steps=1",)),
    ("a short micro-batch", (GRPO, *SHORT), ("ppo_max_token_len_per_gpu=1000", "ppo_max_token_len_per_gpu=1024")),
    ("trained and validated", (GRPO, "data.train_files=[a,b]", "data.val_files=b"), ("'b'", "data.val_files")),
]  # fmt: skip
ACCEPTED: dict[str, tuple[str, ...]] = {
    "maxrl with a format": (MAXRL, TOOLS, "+algorithm.rewards.keys=[format]"),
    "maxrl with its scorer": (MAXRL, GSM8K),
    "dgpo with one key": ("algorithm.adv_estimator=dgpo", GSM8K, ONE),
    "turns and hooks on the default trainer": (*GDPO, TURNS, HOOKS),
    "items": (*GDPO, ITEMS),
    "items, divided by a std after the sum": (COMPOSE, KEYS, ITEMS, BATCH_STD),
    "hooks on the other trainer": (*GDPO, HOOKS, "trainer.use_v1=False"),
    "gdpo by verl's names": (*VERLS, "+algorithm.gdpo.whiten=token"),
    "drgrpo by verl's names": ("algorithm.adv_estimator=drgrpo", *DRGRPO, VERLS[1]),
    "gdpo with its scorer": (*GDPO[:1], TWO, GSM8K),
    "gdpo with dapo's penalty": (*GDPO[:1], OVERLONG, *DAPO, LOGGED),
    "hadw": ("algorithm.adv_estimator=hadw",),
    "hadw with a named accuracy": ("algorithm.adv_estimator=hadw", TWO, GSM8K, NAMED),
    "dgpo with a threshold": (
        *("algorithm.adv_estimator=dgpo", TWO, TOOLS, NAMED, "+algorithm.rewards.accuracy_threshold=0"),
    ),
    "another loss of drgrpo": (
        *("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False", f"{ACTOR}.use_kl_loss=True"),
    ),
    "KL of one combined reward": ("algorithm.adv_estimator=drgrpo", *DRGRPO, "algorithm.use_kl_in_reward=True"),
    "the center of a list without std": (COMPOSE, "+algorithm.compose.steps=[weighted_sum,center]", STD),
    "a preset beside another": ("+verl_ext=[separate_async,hadw]",),
    "grpo with logged rewards": (GRPO, TWO, GSM8K),
    "any_reward": (*GDPO[:1], "+algorithm.rewards.keys=[acc]", FILTER, ANY_REWARD),
    "accuracy_between": (*GDPO, FILTER, BETWEEN, BOUNDS, ACC),
    "somebody's reward function": (*GDPO, f"{PATH}=pkg://somebody.rewards", f"{KWARGS}.maching=x"),
    "one response that is distilled": (GRPO, SINGLE, "distillation.enabled=True"),
    "one response of remax": ("algorithm.adv_estimator=remax", SINGLE),
    "a warm-up with an end": (GRPO, WARMUP, "trainer.total_training_steps=11"),
    "a short micro-batch on two ranks": (GRPO, *SHORT, f"{ACTOR}.ulysses_sequence_parallel_size=2"),
    "a mini-batch that pairs of ranks can share": (
        *(*GDPO, f"{MINI}=3", f"{GPUS}=12", f"{ACTOR}.ulysses_sequence_parallel_size=2"),
    ),
    "a mini-batch of a critic that is not used": (*GDPO, "critic.ppo_mini_batch_size=4", f"{MINI}=6", f"{GPUS}=6"),
    "a mini-batch of another engine": (*GDPO, f"{MINI}=4", f"{GPUS}=6", f"{ACTOR}.strategy=megatron"),
    "base of hadw": (*HADW_GDPO, KEYS, ACC, "+algorithm.gdpo.whiten=token"),
    "dump with keys": (GRPO, KEYS, "+algorithm.verl_ext.dump_dir=/tmp/x"),
    "tool_rewards": (*GDPO[:1], "+algorithm.rewards.keys=[correctness,tool_rewards]", GSM8K),
    "a model with GPUs of its own": (*HADW_GDPO, ONE, MODEL, "reward.reward_model.enable_resource_pool=True"),
    "other names of a model": (*GDPO, GSM8K, MODEL),
    "one greedy response": (
        *(GRPO, KEYS, SINGLE, "actor_rollout_ref.rollout.temperature=0", "distillation.enabled=True"),
    ),
    "a mini-batch that is only validated": (*GDPO, VAL_ONLY, f"{MINI}=4", f"{GPUS}=6"),
    "a warm-up with several updates per step": (
        *(GRPO, KEYS, WARMUP, "trainer.total_training_steps=10", "trainer.v1.trainer_mode=separate_async"),
        "trainer.v1.separate_async.parameter_sync_step=2",
    ),
    "a micro-batch of one sequence": (GRPO, KEYS, SHORT[0], f"{ACTOR}.ppo_max_token_len_per_gpu=1024"),
    "a reward function of verl_ext on an experimental trainer": (GRPO, GSM8K, "+rollout.n=1"),
    "nothing validated": (
        *(GRPO, "data.train_files=a", "data.val_files=a", "trainer.test_freq=-1", "trainer.val_before_train=False"),
    ),
    **{
        f"{name}, only validated": (*given, VAL_ONLY)
        for name, given in {
            "one response": ("algorithm.adv_estimator=hadw", SINGLE),
            "one response of grpo": (GRPO, KEYS, SINGLE),
            "a short micro-batch": (GRPO, KEYS, *SHORT),
            "a warm-up without an end": (GRPO, KEYS, WARMUP, "trainer.total_training_steps=10"),
            "greedy answers": (GRPO, KEYS, "actor_rollout_ref.rollout.temperature=0"),
            "a file": (GRPO, KEYS, "data.train_files=a", "data.val_files=a"),
        }.items()
    },
    "a file of the same name": (*GDPO, f"{PATH}=/nowhere/gsm8k.py", f"{KWARGS}.strict=yes"),
}  # fmt: skip


def names(table):
    cases = [pytest.param(overrides, words, id=name) for name, overrides, words in table]
    return pytest.mark.parametrize(("overrides", "words"), cases)


@pytest.fixture(autouse=True)
def known_verl(monkeypatch):
    """On a verl whose losses the package does not know, the rules are those of the last tested version."""
    if losses.aggregates_itself("sapo") is None:
        monkeypatch.setattr("verl.__version__", list(losses.SELF_AGGREGATING)[-1])


FIRST = ("Add", "Keep", "Remove", "Rename", "Return", "Set", "Start", "Use", "Write")
"""The words with which a fix begins."""
NO_FIX = (
    "'dqw_temp'",
    "dqw_temp=5.0",
    "'keyz'",
    "'skip_zero_advantge'",
    "'gsm8'",
    "'yes'",
    "nothing",
    "accuracy_between",
)
"""Facts of the findings whose text is that of an exception, which has the fix in it."""


def assert_full_sentences(findings):
    """Each finding has a text and a fix."""
    for finding in findings:
        assert finding.text.endswith("."), finding
        if finding.fix or not any(says(finding, fact) for fact in NO_FIX):
            assert finding.fix.startswith(FIRST), finding
            assert finding.fix.endswith("."), finding


@names(ERRORS)
def test_it_is_refused(overrides, words):
    config = compose(*overrides)
    verdict = judge(config)
    assert any(says(error, *words) for error in verdict.errors), verdict.errors
    assert_full_sentences(verdict.findings)
    with pytest.raises(ConfigurationError) as caught:
        check_run(config)
    assert all(str(error) in str(caught.value) for error in verdict.errors)


@names(WARNINGS)
def test_it_is_warned_of(overrides, words):
    verdict = judge(compose(*overrides))
    assert verdict.errors == []
    assert any(says(warning, *words) for warning in verdict.findings), verdict.findings
    assert_full_sentences(verdict.findings)


@names([*ERRORS, *WARNINGS])
def test_no_fix_leads_to_the_next_finding(overrides, words):
    before = judge(compose(*overrides)).findings
    for finding in before:
        for added, removed in ways(finding.fix):
            after = judge(compose(*without(overrides, removed), *added)).findings
            assert {*after} < {*before}, (added, removed)
            assert finding not in after, (added, removed)


IN_REWARD, IN_LOSS = "algorithm.kl_ctrl.kl_coef=0.01", f"{ACTOR}.kl_loss_coef=0.01"
SKIPS = "+algorithm.verl_ext.skip_zero_advantage=True"
# Overrides, one of them about KL that verl does not read, and the setting that the fix sets, or none.
KL: dict[str, tuple[tuple[str, ...], str | None]] = {
    "gdpo": ((*GDPO, IN_REWARD), f"{ACTOR}.use_kl_loss=True"),
    "gdpo that skips": ((*GDPO, SKIPS, IN_REWARD), f"{ACTOR}.use_kl_loss=True"),
    "maxrl": ((MAXRL, IN_REWARD), f"{ACTOR}.use_kl_loss=True"),
    "a sum of one's own": ((COMPOSE, OWN_SUM, KEYS, IN_REWARD), f"{ACTOR}.use_kl_loss=True"),
    "drgrpo by turn": ((*DRGRPO_RUN, KEYS, TURNS, IN_REWARD), None),
    "drgrpo": ((*DRGRPO_RUN, IN_REWARD), "algorithm.use_kl_in_reward=True"),
    "grpo": ((GRPO, IN_REWARD), "algorithm.use_kl_in_reward=True"),
    "loss of drgrpo": ((*DRGRPO_RUN, IN_LOSS), None),
    "loss that skips": ((GRPO, SKIPS, IN_LOSS), f"{ACTOR}.use_kl_loss=True"),
}


@pytest.mark.parametrize("case", KL)
def test_a_kl_term_that_is_not_read_has_a_fix_that_is_accepted(case, tmp_path):
    searched = "hydra: {searchpath: ['pkg://verl.trainer.config']}"
    (tmp_path / "mine.yaml").write_text(f"{searched}\ndefaults: [ppo_trainer, _self_]\n")
    overrides, switch = KL[case]
    (finding,) = judged(tmp_path, *overrides).findings
    fixes = [*ways(finding.fix)]
    assert [added for added, _ in fixes if switch in added] or switch is None
    assert [removed for _, removed in fixes if removed] == [[overrides[-1].partition("=")[0]]]
    for added, removed in fixes:
        assert judged(tmp_path, *without(overrides, removed), *added).findings == ()


@pytest.mark.parametrize("preset", [(), ("+verl_ext=gdpo",)], ids=["without a preset", "with one"])
def test_the_lines_that_are_offered_for_verls_names_are_accepted_by_hydra(preset):
    (error,) = judge(composed_by_hydra(*preset, *VERLS)).errors
    lines = re.findall(r"\S+=(?:token|sequence)\b", error.fix)
    assert len(lines) == 2
    for line in lines:
        assert judge(composed_by_hydra(*preset, *VERLS, line)).errors == []


@pytest.mark.parametrize("case", ACCEPTED)
def test_it_is_accepted_without_a_word(case):
    config = compose(*ACCEPTED[case])
    assert check_run(config).findings == ()
    assert judge(config).findings == ()  # by all rules, also if the run does not use verl_ext


def test_the_log_of_a_training_begins_with_what_check_prints(caplog):
    caplog.set_level("INFO", "verl_ext")
    log_run(judge(compose("algorithm.adv_estimator=dgpo", KEYS, NAMED, "+algorithm.dgpo.balance=sequence")))
    said, warned = (record.getMessage() for record in caplog.records)
    lines = {line.split()[0]: line for line in said.splitlines()}
    for word, fact in (("version", verl_ext.__version__), ("estimator", "dgpo"), ("loss", "token-mean")):
        assert fact in lines[word]
    assert {"steps", "rewards", "accuracy"} <= lines.keys()
    assert says(warned, "algorithm.dgpo.balance=auto")


def test_all_errors_are_said_at_once():
    errors = judge(compose("algorithm.adv_estimator=gdpo", "+algorithm.gdop.x=1", GSM8K, f"{KWARGS}.x=1")).errors
    assert len(errors) == 3


def test_a_hook_that_failed_ends_runs_with_our_estimators_only(monkeypatch):
    def failed(*modules):
        raise IntegrationError(f"not installed: {modules}")

    monkeypatch.setattr(hooks, "require", failed)
    with pytest.raises(IntegrationError):
        judge(compose(*GDPO))
    assert judge(compose(GRPO, KEYS)).errors == []


@pytest.mark.parametrize(("name", "severity"), [("gae", "warning"), ("dgpo", "error")])
def test_an_entry_point_with_a_reserved_name_is_reported(monkeypatch, name, severity):
    """verl computes `gae`, and verl_ext computes `dgpo`."""
    monkeypatch.setattr(estimators, "ENTRY_POINTS", {name: SimpleNamespace(value="their_package:METHOD")})
    findings = judge(compose(f"algorithm.adv_estimator={name}", GSM8K, NAMED)).findings
    assert [finding.severity for finding in findings if says(finding, "their_package:METHOD")] == [severity]
    assert not [finding for finding in judge(compose(GRPO)).findings if says(finding, "their_package:METHOD")]


@pytest.mark.parametrize("run", [DRGRPO_RUN, ("algorithm.adv_estimator=dgpo",)])
def test_a_loss_of_a_verl_that_is_not_known_is_warned_of_where_the_estimator_relies_on_it(monkeypatch, run):
    monkeypatch.setattr(losses, "SELF_AGGREGATING", {})
    loss = f"{ACTOR}.policy_loss.loss_mode=sapo"
    assert [says(finding, "loss_mode=sapo") for finding in judge(compose(*run, loss)).findings] == [True]
    assert judge(compose(*run)).findings == ()
    assert judge(compose(*GDPO, loss)).findings == ()


@pytest.mark.parametrize("run", [("algorithm.adv_estimator=hadw",), (GRPO, FILTER, ANY_REWARD), (GRPO, KEYS, SKIPS)])
def test_an_experimental_trainer_is_rejected_because_it_calls_nothing_of_verl_ext(run):
    errors = judge(compose(*run, "+rollout.n=1")).errors
    assert any(says(error, "section `rollout`", "trainer_mode=separate_async") for error in errors)
    assert not any(says(error, "section `rollout`") for error in judge(compose(*run)).errors)


def test_an_accuracy_that_is_not_named_is_reported_once():
    assert len(judge(compose("algorithm.adv_estimator=hadw", TWO, TOOLS)).errors) == 1


def test_the_fix_for_a_penalty_that_is_named_adds_no_weight():
    errors = judge(compose(*GDPO[:1], OVERLONG, *DAPO, WEIGHTS)).errors
    assert [says(error, "algorithm.rewards.weights") for error in errors] == [False]


def test_only_warnings_are_logged(caplog):
    run = judge(compose(GRPO))
    run.findings = tuple(Finding(severity, severity, "") for severity in ("note", "warning", "error"))
    log_run(run)
    assert caplog.messages == ["warning"]
