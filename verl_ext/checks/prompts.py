"""The lengths of a run's prompts, as its tokenizer and its chat template make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from verl_ext.checks.plan import TOOLS
from verl_ext.run_config import resolved, select

LIMIT = "data.max_prompt_length"
LEFT = 0.9
"""The share of prompts within the limit below which somebody should look."""


class Prompts:
    """Counts the tokens of prompts, if the tokenizer is on this machine; nothing is downloaded."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoTokenizer

        model: Any = select(config, "actor_rollout_ref.model")
        path, self.limit = model.get("tokenizer_path") or model.path, select(config, LIMIT)
        self.lengths: list[int] = []
        self.unknown = "not counted: they show tools" if any(select(config, name) for name in TOOLS) else ""
        self.words = resolved(select(config, "data.apply_chat_template_kwargs")) or {}
        self.words |= {"chat_template": model.get("custom_chat_template"), "add_generation_prompt": True}
        try:
            trusted = bool(model.get("trust_remote_code"))
            with patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):  # else it looks for a hub all the same
                self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trusted)
        except Exception as error:  # noqa: BLE001 - it reads files of others
            self.unknown = f"not counted: no tokenizer of {path} on this machine ({type(error).__name__})"

    def __call__(self, messages: list[dict[str, Any]]) -> None:
        """Count one prompt."""
        if self.unknown:
            return
        try:
            tokens = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **self.words)
            self.lengths.append(len(tokens))
        except Exception as error:  # noqa: BLE001 - a template is a program
            self.unknown = f"not counted: the chat template raises {type(error).__name__}: {error}"

    def told(self) -> Iterator[tuple[str, bool]]:
        """Yield a line, and whether somebody should look at it."""
        if self.unknown or not self.lengths:
            yield self.unknown or "none", "raises" in self.unknown
            return
        left, longest = sum(length <= self.limit for length in self.lengths), max(self.lengths)
        text = f"{left:,} of {len(self.lengths):,} are within {LIMIT}={self.limit}, the longest has {longest:,} tokens"
        yield text, left < LEFT * len(self.lengths)
