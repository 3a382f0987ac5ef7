"""The net under the redesign: two versions of the package run on the same seeded cases, and their results compared.

- `cases` draws cases, `rewards` what verl's reward managers return for them.
- `core`, `trainers`, `other_trainers` and `commands` run a case with one version, and `runner` is a version's process.
- `spelling` translates the settings of a case into the vocabulary of a version, by the tables of `renamed`.
- `compare` compares the results of two versions, and `command` is the command line.

Only `verl_ext.build`, `Settings` and `Batch`, helper functions of the public API, the command line, and verl are used.
"""
