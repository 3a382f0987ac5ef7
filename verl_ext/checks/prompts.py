"""The lengths of a run's prompts, as its tokenizer and its chat template make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from verl_ext.checks.plan import TOOLS
from verl_ext.run_config import resolved, select

LIMIT = "data.max_prompt_length"
ENOUGH = 0.9
"""The fraction of prompts within the limit below which a note is printed."""


class Prompts:
    """Counts the tokens of prompts, if the tokenizer is on this machine; nothing is downloaded."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoTokenizer

        model: Any = select(config, "actor_rollout_ref.model")
        path, self.limit = model.get("tokenizer_path") or model.path, select(config, LIMIT)
        self.lengths: list[int] = []
        self.unknown = "they contain the descriptions of tools" if any(select(config, name) for name in TOOLS) else ""
        self.words = resolved(select(config, "data.apply_chat_template_kwargs")) or {}
        self.words |= {"chat_template": model.get("custom_chat_template"), "add_generation_prompt": True}
        try:
            trusted = bool(model.get("trust_remote_code"))
            with patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):  # else it looks for a hub all the same
                self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trusted)
        except Exception as error:  # noqa: BLE001 - it reads files of others
            self.unknown = f"the tokenizer of {path} is not on this machine ({type(error).__name__})"

    def __call__(self, messages: list[dict[str, Any]]) -> None:
        """Count one prompt."""
        if self.unknown:
            return
        try:
            tokens = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **self.words)
            self.lengths.append(len(tokens))
        except Exception as error:  # noqa: BLE001 - a template is a program
            self.unknown = f"the chat template raises {type(error).__name__}: {error}"

    def summary(self) -> Iterator[tuple[str, bool]]:
        """Yield a sentence about the prompt lengths, and whether it needs a review."""
        if self.unknown or not self.lengths:
            reason = self.unknown or "there are no prompts"
            yield f"Prompt lengths were not counted, because {reason}.", "raises" in reason
            return
        within = sum(length <= self.limit for length in self.lengths)
        counts = f"{within:,} of {len(self.lengths):,} prompts have at most {LIMIT}={self.limit} tokens"
        yield f"{counts}; the longest has {max(self.lengths):,}.", within < ENOUGH * len(self.lengths)
