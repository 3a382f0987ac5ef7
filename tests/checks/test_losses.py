"""The table of the losses of verl that ignore `loss_agg_mode` is correct for the installed verl."""

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


def loss_value(name: str, mode: str) -> float:
    """Return the value of a loss of verl with a `loss_agg_mode`."""
    policy = PolicyLossConfig(loss_mode=name)
    if name == "dro":
        object.__setattr__(policy, "dro_beta", 1.0)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy)
    loss = core_algos.POLICY_LOSS_REGISTRY[name]
    value, *_ = loss(
        old_log_prob=OLD,
        log_prob=NEW,
        advantages=ADVANTAGES,
        response_mask=MASK,
        loss_agg_mode=mode,
        config=config,
    )
    return float(value)


def losses_of_verl() -> list[str]:
    """Return the names of the losses that verl itself registers."""
    registry = core_algos.POLICY_LOSS_REGISTRY
    return [name for name, function in registry.items() if function.__module__ == core_algos.__name__]


@pytest.mark.skipif(verl.__version__ not in SELF_AGGREGATING, reason=f"the table does not know verl {verl.__version__}")
def test_table_has_the_losses_that_ignore_the_mode() -> None:
    ignoring = set()
    for name in losses_of_verl():
        if loss_value(name, "token-mean") == loss_value(name, "seq-mean-token-sum"):
            ignoring.add(name)
    assert ignoring == SELF_AGGREGATING[verl.__version__]


@pytest.mark.parametrize(
    ("version", "loss", "expected"),
    [
        ("0.9.0", "gspo", True),
        ("0.9.1", "gspo", False),
        ("0.10.0.dev", "gspo", None),
        ("99.0", "vanilla", False),
        ("99.0", "of_the_user", False),
    ],
)
def test_loss_aggregates_itself_in_this_version(
    version: str, loss: str, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None means that the version is not known."""
    monkeypatch.setattr("verl.__version__", version)
    assert aggregates_itself(loss) is expected
