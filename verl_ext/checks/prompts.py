"""The lengths of a run's prompts, as its tokenizer and its chat template make them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verl_ext.checks.summary import TOOLS
from verl_ext.errors import Finding
from verl_ext.hooks import temporarily
from verl_ext.run_config import resolved, select

LIMIT = "data.max_prompt_length"
ENOUGH = 0.9
"""The fraction of prompts within the limit below which a note is printed."""
FIX = f"Raise {LIMIT}, shorten the prompts, or correct the chat template."


class PromptLengths:
    """The numbers of tokens of prompts, if the tokenizer is on this machine; nothing is downloaded."""

    def __init__(self, config: Any) -> None:
        self.limit = select(config, LIMIT)
        self.lengths: list[int] = []
        self.why_not_counted = ""
        """Why the lengths are not known; empty if they are."""
        self.template_raises = False
        if any(select(config, name) for name in TOOLS):
            self.why_not_counted = "they contain the descriptions of tools"
        if self.limit is None:
            self.why_not_counted = f"{LIMIT} is not set"
        if self.why_not_counted:
            return
        model: Any = select(config, "actor_rollout_ref.model")
        self._template_options = resolved(select(config, "data.apply_chat_template_kwargs")) or {}
        self._template_options |= {
            "chat_template": model.get("custom_chat_template"),
            "add_generation_prompt": True,
        }
        path = model.get("tokenizer_path") or model.path
        try:
            self._tokenizer = _local_tokenizer(path, trust_remote_code=bool(model.get("trust_remote_code")))
        except Exception as error:  # noqa: BLE001 - it reads files of others
            self.why_not_counted = f"the tokenizer of {path} is not on this machine ({type(error).__name__})"

    def count(self, prompts: Iterable[list[dict[str, Any]]]) -> None:
        """Count the tokens of prompts."""
        for messages in prompts:
            if self.why_not_counted:
                return
            try:
                tokens = self._tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=False, **self._template_options
                )
            except Exception as error:  # noqa: BLE001 - a template is a program
                self.why_not_counted = f"the chat template raises {type(error).__name__}: {error}"
                self.template_raises = True
            else:
                self.lengths.append(len(tokens))

    def summary(self) -> str:
        """Return a sentence about the lengths."""
        if self.why_not_counted or not self.lengths:
            return f"Prompt lengths were not counted, because {self.why_not_counted or 'there are no prompts'}."
        return (
            f"{self._count_within():,} of {len(self.lengths):,} prompts have at most {LIMIT}={self.limit} tokens; the "
            f"longest has {max(self.lengths):,}."
        )

    @property
    def needs_review(self) -> bool:
        """Whether many prompts are too long, or the chat template raises an error."""
        too_few_within_limit = self._count_within() < ENOUGH * len(self.lengths)
        return self.template_raises or too_few_within_limit

    def findings(self) -> list[Finding]:
        """Return the summary as a note if it needs a review."""
        return [Finding("note", self.summary(), FIX)] if self.needs_review else []

    def _count_within(self) -> int:
        return sum(1 for length in self.lengths if length <= self.limit)


def _local_tokenizer(path: str, *, trust_remote_code: bool) -> Any:
    from huggingface_hub import constants
    from transformers import AutoTokenizer

    with temporarily(constants, "HF_HUB_OFFLINE", True):  # otherwise it asks the hub in spite of `local_files_only`
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
