"""Names that verl uses: fields of a batch, files and folders of a checkpoint."""

from __future__ import annotations

SCORE = "score"
TOKEN_FIELD = "token_level_scores_"  # noqa: S105 - a field's name

RESERVED = frozenset(
    {
        *("uid", "index", "data_source", "ability", "reward_model", "extra_info", "agent_name", "extra_fields"),
        *("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"),
        *("rm_scores", "token_level_scores", "token_level_rewards", "advantages", "returns"),
    }
)
"""Fields of verl's batch that are not rewards; a component must not have such a name."""

TRACKER = "latest_checkpointed_iteration.txt"
"""The file that names the current checkpoint."""
STEP_FOLDER = "global_step_"
DATA = "data.pt"
"""The file that every trainer of verl writes into a checkpoint after the model."""
REPLAY_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
