"""Run verl's pipeline on a machine without an accelerator: `python -m verl.trainer.main_ppo +verl_ext=cpu ...`.

`plugin` switches it on in each process. `platform` and `device` describe the CPU to verl, `patches` changes verl where
it does not ask the platform, and `sizes` fits a run to the machine. `verl_ext.checks.on_cpu` rejects settings that need
an accelerator. `rollout` and `generation` implement the rollout named `embedded`.

`rehearse` runs a scaled-down copy of a run in processes of a `session`. `miniature` makes its models and configuration,
`report` reads its results, `responses` replaces the sampled responses with those of a file, and verl's processes record
their `progress`.
"""
