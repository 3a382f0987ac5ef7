"""A tokenizer with one token per character, and one per word that the tiny tasks repeat in every answer."""

from __future__ import annotations

import string
from typing import Any

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
WORDS = (
    *("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"),
    *('{"name": "', '", "parameters": {', '", "arguments": {', '": ', "}}", "Name: ", "Parameters: "),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>' }}{% endif %}"
)


def make_tokenizer(words: tuple[str, ...] = (), *, common: tuple[str, ...] = WORDS) -> Any:
    """`<pad>`, `<s>`, `</s>`, `<unk>`, characters, common and other words: a Qwen2 tokenizer without merges.

    It is byte-level, because transformers always loads a Qwen2 model's tokenizer as such. The words are not special
    tokens: verl drops those when it decodes answers for scoring.
    """
    from transformers import AddedToken, Qwen2Tokenizer

    byte_level = {" ": "\u0120", "\n": "\u010a"}
    names = ["<pad>", "<s>", "</s>", "<unk>", *(byte_level.get(character, character) for character in CHARACTERS)]
    tokenizer = Qwen2Tokenizer(
        vocab={name: number for number, name in enumerate(names)},
        merges=[],
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in (*common, *words)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
