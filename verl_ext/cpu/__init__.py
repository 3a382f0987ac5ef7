"""Run verl's pipeline on a machine without an accelerator: `python -m verl.trainer.main_ppo +verl_ext=cpu ...`.

`plugin` switches it on in each process. `platform` describes the CPU to verl, `patches` changes verl where it does not
ask the platform, and `sizes` fits a run to the machine. `verl_ext.checks.on_cpu` rejects settings that need an
accelerator. `rollout`, `server` and `generation` implement the rollout named `embedded`. `rehearse` runs a scaled-down
copy of a run, whose models and configuration come from `miniature`.
"""
