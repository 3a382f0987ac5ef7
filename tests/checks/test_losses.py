"""The table of verl's losses that take their mean in their own way is what the installed verl does."""

import pytest
import torch
import verl
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from verl_ext.checks.losses import SELF_AGGREGATING, aggregates_itself

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
OLD = torch.linspace(-1.2, -0.1, 12).reshape(3, 4)
NEW = OLD + torch.linspace(-0.1, 0.15, 12).reshape(3, 4)
ADVANTAGES = torch.tensor([[1.0], [-2.0], [3.0]]) * MASK


def value(name: str, mode: str) -> float:
    policy = PolicyLossConfig(loss_mode=name)
    if name == "dro":
        object.__setattr__(policy, "dro_beta", 1.0)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy)
    loss = core_algos.POLICY_LOSS_REGISTRY[name]
    given = {"old_log_prob": OLD, "log_prob": NEW, "advantages": ADVANTAGES, "response_mask": MASK}
    return float(loss(**given, loss_agg_mode=mode, config=config)[0])


def test_the_table_is_what_verls_losses_do() -> None:
    if verl.__version__ not in SELF_AGGREGATING:
        pytest.skip(f"the table does not know verl {verl.__version__}")
    own_way = {
        name
        for name, function in core_algos.POLICY_LOSS_REGISTRY.items()
        if function.__module__ == core_algos.__name__ and value(name, "token-mean") == value(name, "seq-mean-token-sum")
    }
    assert own_way == SELF_AGGREGATING[verl.__version__]


@pytest.mark.parametrize(
    ("version", "loss", "own_way"),
    [
        ("0.9.0", "gspo", True),
        ("0.9.1", "gspo", False),
        ("0.10.0.dev", "gspo", None),
        ("99.0", "vanilla", False),
        ("99.0", "of_the_user", False),
    ],
)
def test_it_depends_on_the_version(version: str, loss: str, own_way: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.__version__", version)
    assert aggregates_itself(loss) is own_way
