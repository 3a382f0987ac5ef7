"""Settings that the tests of the default trainer share."""

from __future__ import annotations

DRGRPO = ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False")
HADW = ("algorithm.adv_estimator=hadw", "+algorithm.hadw.eta_min=0")
GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]", "+algorithm.gdpo.epsilon=1e-4")
ACC = "+algorithm.rewards.keys=[acc]"
# Twelve rows, and a batch that must be a multiple of 16: four rows of padding.
PADDED = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
