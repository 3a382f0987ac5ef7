"""Runs with presets: the user's files, in the folder OWN, and the command line."""

from __future__ import annotations

KEYS = "algorithm.rewards.keys=[acc,format]"
PRIMARY = "hydra: {searchpath: ['pkg://verl.trainer.config']}\ndefaults: %s\n"
IN_A_GROUP = "# @package _global_\ndefaults: %s\n"
OURS = """
algorithm:
  rewards: {keys: [acc, format], weights: [1, 0.5]}
  dgpo: {dqw_temp: 5.0, dqw: false}
  gdpo: {whiten: token}
actor_rollout_ref: {actor: {loss_agg_mode: seq-mean-token-mean}}
"""
# Of these the preset of dgpo sets all but gdpo's.
LOST = (
    "algorithm.rewards.keys=['acc', 'format'] (by None)",
    "algorithm.rewards.weights=[1, 0.5] (by None)",
    "algorithm.dgpo.dqw_temp=5.0 (by 2.0)",
    "algorithm.dgpo.dqw=False (by True)",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean (by token-mean)",
)
NO_PRESET = {"mine.yaml": PRIMARY % "[ppo_trainer, _self_]" + OURS}
GRPO = "algorithm: {adv_estimator: grpo, rewards: {keys: [acc, format]}}"
MINE = "--config-path OWN --config-name mine"

# The user's files, in the folder OWN, and the command line.
LATE = {
    "on the command line": (NO_PRESET, f"{MINE} +verl_ext=dgpo"),
    "on the command line with a package": (NO_PRESET, f"{MINE} +verl_ext@_global_=dgpo"),
    "on the command line in a list": (NO_PRESET, f"{MINE} +verl_ext=[cpu,dgpo]"),
    "on the command line of a sweep": (NO_PRESET, f"{MINE} --multirun +verl_ext=dgpo,hadw"),
    "after _self_": ({"mine.yaml": PRIMARY % "[ppo_trainer, _self_, verl_ext: dgpo]" + OURS}, MINE),
    "after _self_ in a list": ({"mine.yaml": PRIMARY % "[ppo_trainer, _self_, verl_ext: [cpu, dgpo]]" + OURS}, MINE),
    "after another file of the user's": (
        {
            "mine.yaml": PRIMARY % "[base, verl_ext: dgpo, _self_]",
            "base.yaml": "defaults: [ppo_trainer, _self_]" + OURS,
        },
        MINE,
    ),
    "within another file of the user's": (
        {
            "mine.yaml": PRIMARY % "[base, _self_]",
            "base.yaml": "defaults: [ppo_trainer, _self_, verl_ext: dgpo]" + OURS,
        },
        MINE,
    ),
    "in a group of the user's": (
        {"experiment/mine.yaml": IN_A_GROUP % "[_self_, /verl_ext: dgpo]" + OURS},
        "--config-dir OWN +experiment=mine",
    ),
    "in a group on the search path": (
        {"experiment/mine.yaml": IN_A_GROUP % "[_self_, '/verl_ext@_global_': [dgpo]]" + OURS},
        "hydra.searchpath=[file://OWN] +experiment=mine",
    ),
}
EARLY = {
    "in an empty place after _self_": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, _self_, verl_ext: null]" + "algorithm: {gamma: 1.0}"},
        f"{MINE} verl_ext=dgpo {KEYS}",
    ),
    "before _self_": ({"mine.yaml": PRIMARY % "[ppo_trainer, verl_ext: dgpo, _self_]" + OURS}, MINE),
    "within another file of the user's, before": (
        {
            "mine.yaml": PRIMARY % "[base, _self_]",
            "base.yaml": "defaults: [ppo_trainer, 'verl_ext@_global_': [dgpo], _self_]" + OURS,
        },
        MINE,
    ),
    "in a group of the user's, before": (
        {"experiment/mine.yaml": IN_A_GROUP % "[/verl_ext: dgpo, _self_]" + OURS},
        "--config-dir OWN +experiment=mine",
    ),
    "as the file's base": ({"mine.yaml": PRIMARY % "[dgpo, _self_]" + OURS}, MINE),
    # One of them as the preset has it: the user says so now.
    "repeated on the command line": (
        NO_PRESET,
        f"{MINE} +verl_ext=dgpo {KEYS} algorithm.rewards.weights=[1,0.5] algorithm.dgpo.dqw_temp=5 "
        "algorithm.dgpo.dqw=True actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    ),
    "deleted on the command line": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, _self_]" + "algorithm: {dgpo: {dqw_temp: 5.0}}"},
        f"{MINE} +verl_ext=dgpo {KEYS} ~algorithm.dgpo.dqw_temp",
    ),
}
OTHER = {
    "further down in the file": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, verl_ext: gdpo, _self_]" + GRPO},
        MINE,
        "grpo",
    ),
    "further down than the file's base": ({"mine.yaml": PRIMARY % "[gdpo, _self_]" + GRPO}, MINE, "grpo"),
    "verl's own, which the preset stands before": (
        {"mine.yaml": PRIMARY % "[verl_ext: gdpo, ppo_trainer, _self_]"},
        f"{MINE} +{KEYS}",
        "gae",
    ),
    "estimator on the command line": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, verl_ext: gdpo, _self_]"},
        f"{MINE} {KEYS} algorithm.adv_estimator=dgpo",
        "dgpo",
    ),
    "both on the command line": ({}, f"+verl_ext=[cpu,gdpo] {KEYS} algorithm.adv_estimator=rloo", "rloo"),
    "both, with a package": ({}, f"+verl_ext@_global_=gdpo {KEYS} algorithm.adv_estimator=grpo", "grpo"),
    "beside the primary configuration": ({}, f"--config-name gdpo {KEYS} algorithm.adv_estimator=grpo", "grpo"),
}
TWO = {
    "two in a list": ({}, f"+verl_ext=[drgrpo,gdpo] {KEYS}"),
    "two in two packages": ({}, f"+verl_ext=drgrpo +verl_ext@_global_=gdpo {KEYS}"),
    "two in two files": ({"mine.yaml": PRIMARY % "[drgrpo, verl_ext: gdpo, _self_]"}, f"{MINE} {KEYS}"),
}
SWEEP = "--multirun +verl_ext=gdpo,dgpo trainer.experiment_name=${algorithm.adv_estimator}"
SWEEPS = {
    "of names": ({}, f"{SWEEP} ++{KEYS} ++algorithm.verl_ext.check_nodes=False"),
    "of lists": ({}, f"{SWEEP.replace('gdpo,dgpo', '[cpu,gdpo],[cpu,dgpo]')} ++{KEYS}"),
    "of a file's preset": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, verl_ext: gdpo, _self_]"},
        f"{MINE} {SWEEP.replace('+', '')} {KEYS}",
    ),
}
ESTIMATOR = {
    "the file's, then the preset": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, _self_, verl_ext: gdpo]" + "algorithm: {adv_estimator: grpo}"},
        f"{MINE} {KEYS}",
    ),
    "the file's, and a preset on the command line": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, _self_]" + "algorithm: {adv_estimator: grpo}"},
        f"{MINE} +verl_ext=gdpo {KEYS}",
    ),
}
# Presets after `_self_` that replace no value: the file and its lines as they are and as they should be.
NOTHING = "trainer: {total_training_steps: 1}"
AFTER = {
    "after _self_ at the front": (
        {"mine.yaml": PRIMARY % "[_self_, ppo_trainer, verl_ext: gdpo]" + NOTHING},
        f"{MINE} {KEYS}",
        "mine.yaml",
        "[_self_, ppo_trainer, verl_ext: gdpo]",
        "[ppo_trainer, verl_ext: gdpo, _self_]",
    ),
    "cpu": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, _self_, verl_ext: cpu]" + NOTHING},
        MINE,
        "mine.yaml",
        "[ppo_trainer, _self_, verl_ext: cpu]",
        "[ppo_trainer, verl_ext: cpu, _self_]",
    ),
    "a list, beside one on the command line": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, _self_, 'verl_ext@_global_': [separate_async, vllm]]" + NOTHING},
        f"{MINE} +verl_ext=gdpo {KEYS}",
        "mine.yaml",
        "[ppo_trainer, _self_, verl_ext: [separate_async, vllm]]",
        "[ppo_trainer, verl_ext: [separate_async, vllm], _self_]",
    ),
    "one between others": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, _self_, verl_ext: gdpo, other]" + NOTHING, "other.yaml": NOTHING},
        f"{MINE} {KEYS}",
        "mine.yaml",
        "[ppo_trainer, _self_, verl_ext: gdpo, other]",
        "[ppo_trainer, verl_ext: gdpo, _self_, other]",
    ),
    "one within another file": (
        {"mine.yaml": PRIMARY % "[base, _self_]", "base.yaml": "defaults: [ppo_trainer, _self_, verl_ext: gdpo]"},
        f"{MINE} {KEYS}",
        "base.yaml",
        "[ppo_trainer, _self_, verl_ext: gdpo]",
        "[ppo_trainer, verl_ext: gdpo, _self_]",
    ),
    "one in a group": (
        {"experiment/mine.yaml": IN_A_GROUP % "[_self_, /verl_ext: gdpo]" + NOTHING},
        f"--config-dir OWN +experiment=mine {KEYS}",
        "experiment/mine.yaml",
        "[_self_, verl_ext: gdpo]",
        "[verl_ext: gdpo, _self_]",
    ),
}
INTERPOLATED = {
    "of the run": (
        {},
        f"+verl_ext=gdpo {KEYS} trainer.experiment_name=${{.project_name}} +trainer.what=${{trainer.nnodes}}",
    ),
    "of nothing": ({}, f"+verl_ext=gdpo {KEYS} algorithm.gdpo.epsilon=${{oc.env:VERL_EXT_NO_SUCH}}"),
}
ELSEWHERE = {
    "in a package of its own": ({}, "+verl_ext@elsewhere.deep=gdpo"),
    "in a package of its own, after _self_": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, _self_, 'verl_ext@elsewhere.deep': gdpo]" + NOTHING},
        MINE,
    ),
}

MISSPELT = {"a misspelt group": ({}, "+verl_etx=gdpo"), "a misspelt group with a list": ({}, "+verl_exts=[cpu,gdpo]")}
