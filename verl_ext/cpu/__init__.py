"""verl's real pipeline on a machine without an accelerator: `python -m verl.trainer.main_ppo +verl_ext=cpu ...`.

`plugin` decides in each process whether any of this is wanted and schedules it; `platform` tells verl what a CPU is;
`patches` are the places where verl does not ask the platform; `checks` refuse at start what cannot work; `rollout`,
`server` and `generation` are the rollout named `embedded`; `weights` brings it the weights from other processes.
"""
