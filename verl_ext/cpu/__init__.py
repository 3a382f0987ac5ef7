"""verl's real pipeline on a machine without an accelerator: `python -m verl.trainer.main_ppo +verl_ext=cpu ...`.

`plugin` switches it on in each process. `platform` describes the CPU to verl, `patches` changes verl where it does not
ask the platform, `sizes` fits a run to the machine, and `checks` refuses what cannot run. `rollout`, `server` and
`generation` are the rollout named `embedded`. `rehearse` runs a run in miniature, which `miniature` cuts down.
"""
