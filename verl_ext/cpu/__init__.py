"""verl's real pipeline on a machine without an accelerator: `python -m verl.trainer.main_ppo +verl_ext=cpu ...`.

`plugin` switches this on in each process and schedules the rest. `platform` describes the CPU to verl, and `patches`
changes verl where it does not ask the platform. `checks` raises at start-up for what cannot work. `rollout`, `server`
and `generation` are the rollout named `embedded`; `weights` sends it the weights from other processes.
"""
