"""The recipes' arms, and the papers' set-ups that they must compose to."""

from __future__ import annotations

from typing import Any

ALGORITHMS = ("gdpo", "grpo", "dgpo", "hadw", "drgrpo")
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
FUNCTION = "reward.custom_reward_function"

NO_KL = {"algorithm.use_kl_in_reward": False, f"{ACTOR}.use_kl_loss": False}
CLIP = {f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.2}
TOKENS = {f"{ACTOR}.loss_agg_mode": "token-mean"}
NO_DUAL_CLIP = {f"{ACTOR}.clip_ratio_c": 1e6}
# What all the published scripts have in common, mostly by their frameworks' defaults.
PUBLISHED = {
    f"{ACTOR}.grad_clip": 1.0,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.optim.min_lr_ratio": 0.0,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    f"{ROLLOUT}.val_kwargs.n": 1,
}
ON_A_GPU = {
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{MODEL}.use_remove_padding": True,
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.gpu_memory_utilization": 0.6,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
}


def sizes(batch: int, mini: int, samples: int, prompt: int, response: int) -> dict[str, Any]:
    return {
        "data.train_batch_size": batch,
        f"{ACTOR}.ppo_mini_batch_size": mini,
        f"{ROLLOUT}.n": samples,
        "data.max_prompt_length": prompt,
        "data.max_response_length": response,
        f"{ROLLOUT}.prompt_length": prompt,
        f"{ROLLOUT}.response_length": response,
    }


def optim(lr: float, decay: float, **settings: Any) -> dict[str, Any]:
    """A constant rate without warm-up, unless the settings say otherwise. Warm-up in steps goes before its ratio."""
    plain = {
        "lr_scheduler_type": "constant",
        "lr_warmup_steps": -1,
        "lr_warmup_steps_ratio": 0,
        "betas": [0.9, 0.999],
    }
    found = {"lr": lr, "weight_decay": decay, **plain, **settings}
    return {f"{ACTOR}.optim.{name}": value for name, value in found.items()}


def every(test: int, save: int) -> dict[str, Any]:
    return {"trainer.test_freq": test, "trainer.save_freq": save}


TOOLS = {
    **ON_A_GPU,
    **sizes(512, 128, 4, 2048, 1024),
    **PUBLISHED,
    **optim(1e-6, decay=0.01),
    **CLIP,
    **NO_DUAL_CLIP,
    **TOKENS,
    **every(test=10, save=5),
    "data.truncation": "left",
    f"{MODEL}.path": "Qwen/Qwen2.5-1.5B-Instruct",
    f"{ACTOR}.entropy_coeff": 0.001,
    f"{FUNCTION}.path": "pkg://verl_ext.rewards.tool_calling",
    f"{FUNCTION}.name": "compute_score",
    f"{FUNCTION}.reward_kwargs": {"matching": "greedy"},
    "reward.reward_manager.name": "naive",
    "algorithm.rewards.keys": ["correctness", "format"],
    "algorithm.norm_adv_by_std_in_grpo": True,
    "trainer.total_epochs": 15,
    "trainer.total_training_steps": None,
}
RIGHT_CALL = {"algorithm.rewards.accuracy_key": "correctness", "algorithm.rewards.accuracy_threshold": 2.999}
TOOLS_KL = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_penalty": "kl",
    f"{ACTOR}.use_kl_loss": False,
}
GSM8K = {
    **ON_A_GPU,
    **sizes(32, 32, 16, 512, 1024),
    **PUBLISHED,
    **optim(5e-6, decay=0, lr_scheduler_type="cosine", lr_warmup_steps_ratio=0.1),
    **CLIP,
    **NO_DUAL_CLIP,
    **every(test=25, save=20),
    **TOKENS,
    f"{MODEL}.path": "Qwen/Qwen2.5-1.5B-Instruct",
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.04,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.entropy_coeff": 0,
    "algorithm.use_kl_in_reward": False,
    f"{FUNCTION}.path": "pkg://verl_ext.rewards.gsm8k",
    f"{FUNCTION}.reward_kwargs": {"strict": "corrected"},
    "algorithm.rewards.keys": ["correctness", "integer", "format"],
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": None,
}
MATHS = {
    **ON_A_GPU,
    **PUBLISHED,
    **NO_KL,
    f"{ACTOR}.entropy_coeff": 0,
    f"{FUNCTION}.path": "pkg://verl_ext.rewards.boxed_math",
    "algorithm.rewards.keys": ["accuracy"],
}
MATHFORGE = {
    **MATHS,
    **sizes(32, 32, 8, 512, 1024),
    **optim(5e-7, decay=0),
    **CLIP,
    **NO_DUAL_CLIP,
    **every(test=10, save=50),
    **TOKENS,
    f"{MODEL}.path": "Qwen/Qwen2.5-Math-7B",
    "trainer.total_epochs": 1,
}
HADW = {
    **MATHS,
    **sizes(256, 16, 8, 1024, 4096),
    **optim(1e-6, decay=0.1, lr_warmup_steps=10),
    f"{ACTOR}.clip_ratio_c": 3.0,
    **every(test=20, save=20),
    f"{MODEL}.path": "Qwen/Qwen3-4B-Base",
    "trainer.total_epochs": 3,
}
HADW_GRPO = {
    **HADW,
    **CLIP,
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    "algorithm.filter_groups.enable": False,
}
HADW_GSPO = {
    **HADW,
    **CLIP,
    f"{ACTOR}.policy_loss.loss_mode": "gspo",
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
}
GSPO_CLIP = {f"{ACTOR}.clip_ratio_low": 3e-4, f"{ACTOR}.clip_ratio_high": 4e-4}  # verl's GSPO example
HADW_DAPO = {
    **HADW,
    **TOKENS,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.28,
    f"{ACTOR}.clip_ratio_c": 10.0,
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.metric": "accuracy",
    "trainer.total_epochs": 9,
}
WEIGHED = {
    "algorithm.hadw.base": "grpo",
    "algorithm.hadw.anchor": "soft",
    "algorithm.hadw.lambda_scale": 1.3,
    "algorithm.rewards.accuracy_key": "accuracy",
}
DRGRPO = {
    **MATHS,
    **sizes(128, 16, 8, 1024, 3000),
    **optim(1e-6, decay=0, betas=[0.9, 0.95]),
    **CLIP,
    **NO_DUAL_CLIP,
    **every(test=16, save=50),
    f"{MODEL}.path": "Qwen/Qwen2.5-Math-7B",
    "trainer.total_epochs": 20,
}
DRGRPO_LOSS = {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.use_kl_loss": False}


def dgpo(**settings: Any) -> dict[str, Any]:
    accuracy = settings.pop("accuracy_key", "accuracy")
    found = {"dgae": True, "dqw": True, "dqw_temp": 2.0, "balance": "auto", **settings}
    of_dgpo = {f"algorithm.dgpo.{name}": value for name, value in found.items()}
    return {"algorithm.rewards.accuracy_key": accuracy, **of_dgpo}


# recipe, variables, what is expected of the composed configuration; the first line of each recipe is its default
ARMS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "tools gdpo": (
        "tool_calling",
        {},
        {**TOOLS, **NO_KL, "algorithm.adv_estimator": "gdpo", "algorithm.gdpo.whiten": "token"},
    ),
    "tools gdpo 3B": (
        "tool_calling",
        {"MODEL_PATH": "Qwen/Qwen2.5-3B-Instruct"},
        {**TOOLS, **NO_KL, "algorithm.adv_estimator": "gdpo", f"{MODEL}.path": "Qwen/Qwen2.5-3B-Instruct"},
    ),
    "tools grpo, as published": ("tool_calling", {"ALGORITHM": "grpo"}, {**TOOLS, **TOOLS_KL}),
    "tools grpo, clean": ("tool_calling", {"ALGORITHM": "grpo", "KL_IN_REWARD": "False"}, {**TOOLS, **NO_KL}),
    "tools grpo 3B": (
        "tool_calling",
        {"ALGORITHM": "grpo", "MODEL_PATH": "Qwen/Qwen2.5-3B-Instruct"},
        {**TOOLS, **TOOLS_KL, f"{MODEL}.path": "Qwen/Qwen2.5-3B-Instruct"},
    ),
    "tools grpo without std": (
        "tool_calling",
        {"ALGORITHM": "grpo", "NORM_BY_STD": "False"},
        {**TOOLS, **TOOLS_KL, "algorithm.norm_adv_by_std_in_grpo": False},
    ),
    "tools dgpo": ("tool_calling", {"ALGORITHM": "dgpo"}, {**TOOLS, **NO_KL, **RIGHT_CALL}),
    "tools hadw": ("tool_calling", {"ALGORITHM": "hadw"}, {**TOOLS, **NO_KL, **RIGHT_CALL}),
    "tools drgrpo": (
        "tool_calling",
        {"ALGORITHM": "drgrpo"},
        {**TOOLS, **NO_KL, **DRGRPO_LOSS, f"{ACTOR}.loss_scale_factor": 1024},
    ),
    "gsm8k gdpo": (
        "gsm8k",
        {},
        {**GSM8K, "algorithm.gdpo.whiten": "sequence", "algorithm.gdpo.epsilon": 1e-4},
    ),
    "gsm8k gdpo, as the reference reads numbers": (
        "gsm8k",
        {"STRICT": "reference"},
        {**GSM8K, f"{FUNCTION}.reward_kwargs": {"strict": "reference"}},
    ),
    "gsm8k grpo": ("gsm8k", {"ALGORITHM": "grpo"}, GSM8K),
    "gsm8k hadw": ("gsm8k", {"ALGORITHM": "hadw"}, {**GSM8K, "algorithm.rewards.accuracy_key": "correctness"}),
    "gsm8k dgpo": (
        "gsm8k",
        {"ALGORITHM": "dgpo"},
        {**GSM8K, f"{ACTOR}.use_kl_loss": False, "algorithm.rewards.accuracy_key": "correctness"},
    ),
    "gsm8k drgrpo": (
        "gsm8k",
        {"ALGORITHM": "drgrpo"},
        {**GSM8K, **DRGRPO_LOSS, f"{ACTOR}.loss_scale_factor": 1024},
    ),
    "maths dgpo": ("math", {}, {**MATHFORGE, **dgpo(), "algorithm.adv_estimator": "dgpo"}),
    "maths dgpo, balancing only": (
        "math",
        {"DGAE": "False", "DQW": "False"},
        {**MATHFORGE, **dgpo(dgae=False, dqw=False, accuracy_key=None)},
    ),
    "maths dgpo, balancing and DGAE": ("math", {"DQW": "False"}, {**MATHFORGE, **dgpo(dqw=False, accuracy_key=None)}),
    "maths dgpo, another temperature": ("math", {"DQW_TEMP": "5"}, {**MATHFORGE, **dgpo(dqw_temp=5)}),
    "maths dgpo, no balancing": ("math", {"BALANCE": "none"}, {**MATHFORGE, **dgpo(balance="none")}),
    "maths grpo": ("math", {"ALGORITHM": "grpo"}, MATHFORGE),
    "maths gspo": (
        "math",
        {"ALGORITHM": "grpo", "LOSS": "gspo"},
        {**MATHFORGE, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean", **GSPO_CLIP},
    ),
    "maths gdpo": ("math", {"ALGORITHM": "gdpo"}, MATHFORGE),
    "maths hadw over grpo": ("math", {"ALGORITHM": "hadw"}, {**HADW_GRPO, **WEIGHED}),
    "maths hadw over gspo": ("math", {"ALGORITHM": "hadw", "LOSS": "gspo"}, {**HADW_GSPO, **WEIGHED}),
    "maths hadw over dapo": ("math", {"ALGORITHM": "hadw", "LOSS": "dapo"}, {**HADW_DAPO, **WEIGHED}),
    "maths grpo in hadw's set-up": ("math", {"ALGORITHM": "grpo", "SETUP": "hadw"}, HADW_GRPO),
    "maths gspo in hadw's set-up": ("math", {"ALGORITHM": "grpo", "SETUP": "hadw", "LOSS": "gspo"}, HADW_GSPO),
    "maths dapo in hadw's set-up": ("math", {"ALGORITHM": "grpo", "SETUP": "hadw", "LOSS": "dapo"}, HADW_DAPO),
    "maths drgrpo": (
        "math",
        {"ALGORITHM": "drgrpo"},
        {**DRGRPO, **DRGRPO_LOSS, f"{ACTOR}.loss_scale_factor": 3000},
    ),
    "maths grpo in drgrpo's set-up": ("math", {"ALGORITHM": "grpo", "SETUP": "drgrpo"}, {**DRGRPO, **TOKENS}),
}

# What the checks say of an arm, by a part of it. Several updates a step are the experiment's own.
WARNED = {"tools dgpo": "exact for one update per step; data.train_batch_size=512"}
