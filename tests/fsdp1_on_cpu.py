"""Let FSDP1, verl's default, train on the CPU, where torch, verl and verl_ext do not accept it.

`allow` does this for the current process. The processes of a whole run call it if `VERL_USE_EXTERNAL_MODULES` names
this module. FSDP1 itself stays as it is. It wraps the layers on one rank, and also shards and reduces with gloo on two.
"""

import os

from verl_ext.hooks import after_import, wrap


def remove_check_of_device(module):
    """Let rank 0 send its parameters to the other ranks although they are on the CPU."""
    module._check_module_states_for_sync_module_states = lambda _states: None


def stay_on_cpu(original, model):
    """Do not move the parameters: verl would move them to `cpu:cpu`, which is no device."""


def without_strategy(original, engine, model):
    """Return the requirements of a run on the CPU without that of FSDP2."""
    return tuple(requirement for requirement in original(engine, model) if requirement.path != f"{engine}.strategy")


def allow() -> None:
    """Change the three places in this process, now or when they are imported."""
    after_import("torch.distributed.fsdp._init_utils", remove_check_of_device)
    after_import("verl.utils.fsdp_utils", lambda module: wrap(module, "load_fsdp_model_to_gpu", stay_on_cpu))
    after_import("verl_ext.checks.on_cpu", lambda module: wrap(module, "requirements_of_model", without_strategy))


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    allow()
