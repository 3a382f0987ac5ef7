"""Check the configuration of a run, before Ray starts and when the trainer is built; `verl-ext check`."""
