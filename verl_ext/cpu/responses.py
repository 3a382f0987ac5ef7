"""In a rehearsal with `--responses`, the embedded rollout returns the responses of a file instead of sampled ones."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from verl_ext.checks.samples import read_responses

Tokens = tuple[int, ...]
Turns = list[list[int]]
"""The tokens of each turn of a session."""


class FileResponses:
    """The responses of a JSONL file, and the sessions that have begun with them."""

    def __init__(self, file: Path, tokenizer: Any) -> None:
        self.lines: list[Turns] = []
        for texts in read_responses(file):
            turns = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            self.lines.append([[*tokens, tokenizer.eos_token_id] for tokens in turns])
        self.next_turns: defaultdict[Tokens, list[Turns]] = defaultdict(list)
        """By the tokens of a conversation so far: the next turns of each session with these tokens."""

    def next_response(self, prompt: Tokens, earlier_requests: int) -> list[int]:
        """Return the next response to a prompt, for which there were already some requests.

        The tokens of a prompt choose the line of its first response, and its other responses are the lines after it.
        A prompt that begins with the tokens of a conversation is the next turn of that conversation. The last turn of a
        session repeats.
        """
        conversation = self._longest_conversation(prompt)
        if conversation is None:
            turns = self.lines[(sum(prompt) + earlier_requests) % len(self.lines)]
        else:
            turns = self.next_turns[conversation].pop(0)
        response, later_turns = turns[0], turns[1:]
        self.next_turns[prompt + tuple(response)].append(later_turns or turns)
        return response

    def _longest_conversation(self, prompt: Tokens) -> Tokens | None:
        """Return the longest conversation with a further turn that the prompt begins with."""
        longest: Tokens | None = None
        for conversation, sessions in self.next_turns.items():
            continues = bool(sessions) and prompt[: len(conversation)] == conversation
            if continues and (longest is None or len(conversation) > len(longest)):
                longest = conversation
        return longest

    def forget_sessions(self) -> None:
        """Let every prompt begin a new session."""
        self.next_turns.clear()
