"""Generate the quickstart's model and data in data/quickstart. This takes a minute on one core.

    python recipes/quickstart/prepare_data.py

The task is tool calling with synthetic tools, in the format of ToolRL's `rlla` data. A prompt offers two tools and
names one of them and two values, and the correct response is one call. The model has 200 thousand parameters and is
first trained with supervision on responses of which 20% are correct, 40% have an incorrect call in the correct format,
and 40% have the correct call in an incorrect format. So the two rewards conflict at first, and the larger reward
(correctness, -3 to 3) can dominate the smaller reward (format, 0 or 1).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas
import torch
from tqdm import tqdm

RIGHT, WRONG_CALL = 0.2, 0.4
"""Fractions of the responses in the supervised training. The rest have an incorrect format."""
TOOLS: dict[str, tuple[str, str]] = {
    "timer": ("minutes", "label"),
    "play": ("volume", "song"),
    "light": ("level", "room"),
    "mail": ("hour", "to"),
    "book": ("seats", "place"),
    "search": ("limit", "topic"),
}
"""Maps names to parameters. The first parameter takes a number, the second takes a word."""
NUMBERS = range(1, 10)
VALUES = ("tea", "jazz", "hall", "anna", "rome", "music", "lunch", "garden", "train", "news")


@dataclass(frozen=True)
class Example:
    """A prompt, its ground truth, and a response for the supervised training, which may be incorrect."""

    messages: Sequence[dict[str, str]]
    ground_truth: str
    answer: str


@dataclass(frozen=True)
class Call:
    """One call of a tool."""

    name: str
    number: int
    word: str

    @property
    def text(self) -> str:
        """Return the call as one line of JSON."""
        first, second = TOOLS[self.name]
        return json.dumps({"name": self.name, "parameters": {first: self.number, second: self.word}})


def answer(call: str, thought: str) -> str:
    """Return a response in the correct format."""
    return f"<think>{thought}</think>\n<tool_call>\n{call}\n</tool_call>"


def draw(rng: random.Random) -> Example:
    """Sample a prompt with its ground truth and a response that may be incorrect in one respect."""
    name, other = rng.sample(sorted(TOOLS), 2)
    call = Call(name, rng.choice(NUMBERS), rng.choice(VALUES))
    offered = [name, other] if rng.random() < 0.5 else [other, name]
    truth = answer(call.text, name)
    luck = rng.random()
    if luck < RIGHT:
        attempt = truth
    elif luck < RIGHT + WRONG_CALL:
        attempt = answer(wrong_call(call, other, rng), name)
    else:
        attempt = rng.choice(WRONG_FORMATS)(truth)
    tools = "".join(f"Name: {tool}\nParameters: {', '.join(TOOLS[tool])}\n" for tool in offered)
    question = f"{call.name} {call.number} {call.word}"
    return Example([{"role": "system", "content": tools}, {"role": "user", "content": question}], truth, attempt)


def wrong_call(call: Call, other: str, rng: random.Random) -> str:
    """Return a call of the other tool, with another number, with an incorrect key, or with invalid JSON."""
    kind = rng.randrange(4)
    if kind == 0:
        return replace(call, name=other).text
    if kind == 1:
        return replace(call, number=rng.choice([number for number in NUMBERS if number != call.number])).text
    return call.text.replace('"parameters"', '"arguments"') if kind == 2 else call.text.removesuffix("}")


WRONG_FORMATS: tuple[Callable[[str], str], ...] = (
    lambda text: text.partition("</think>\n")[2],  # no <think> block
    lambda text: text.replace("</think>\n", "</think>"),  # no line break before the call
    lambda text: text.replace("</think>\n", "</think>\n\n"),
    lambda text: text + "\nok",
)

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
WORDS = (
    *("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"),
    *('{"name": "', '", "parameters": {', '", "arguments": {', '": ', "}}", "Name: ", "Parameters: "),
    *TOOLS,
    *(name for names in TOOLS.values() for name in names),
    *VALUES,
)
"""Words with one token each, in addition to one token per character."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>' }}{% endif %}"
)


def make_tokenizer(words: Sequence[str] = WORDS) -> Any:
    """Make a Qwen2 tokenizer without merges from `<pad>`, `<s>`, `</s>`, `<unk>`, the characters and the words.

    The tokenizer is byte-level, because transformers always loads the tokenizer of a Qwen2 model as byte-level. The
    words are not special tokens, because verl drops special tokens when it decodes responses for scoring.
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
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, *, seed: int = 0, **changes: Any) -> Any:
    """Make a Qwen2 model with three layers, or with `changes` of its configuration."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,  # with the usual 0.02, such a narrow model learns to copy ten times more slowly
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen2ForCausalLM(Qwen2Config(**settings | changes))


def encode(tokenizer: Any, example: Example) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt, as verl's rollout gets it, and of the response with its end token."""
    prompt = tokenizer.apply_chat_template(list(example.messages), add_generation_prompt=True, tokenize=False)
    tokens = tokenizer.encode(example.answer, add_special_tokens=False)
    return tokenizer.encode(prompt, add_special_tokens=False), [*tokens, tokenizer.eos_token_id]


def batches(tokenizer: Any, *, seed: int, size: int = 32) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of new examples, padded on the right, whose labels are the tokens of the responses."""
    rng = random.Random(seed)
    while True:
        pairs = [encode(tokenizer, draw(rng)) for _ in range(size)]
        width = max(len(prompt) + len(tokens) for prompt, tokens in pairs)
        input_ids = torch.full((size, width), tokenizer.pad_token_id)
        labels = torch.full((size, width), -100)  # transformers excludes these from the loss
        for row, (prompt, tokens) in enumerate(pairs):
            end = len(prompt) + len(tokens)
            input_ids[row, :end] = torch.tensor(prompt + tokens)
            labels[row, len(prompt) : end] = torch.tensor(tokens)
        yield {"input_ids": input_ids, "attention_mask": (input_ids != tokenizer.pad_token_id).long(), "labels": labels}


def warm_up(model: Any, tokenizer: Any, *, steps: int) -> None:
    """Train with supervision. The learning rate has a warm-up of a tenth of the steps and a cosine decay to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    model.train()
    examples = batches(tokenizer, seed=0)
    for _ in tqdm(range(steps), desc="Warm-up", file=sys.stdout, mininterval=1):
        loss = model(**next(examples)).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def rows(count: int, *, split: str) -> list[dict[str, Any]]:
    """Sample rows in verl's parquet format."""
    rng = random.Random(f"{split}-0")
    examples = [draw(rng) for _ in range(count)]
    return [
        {
            "data_source": "rlla",
            "prompt": list(example.messages),
            "ability": "quickstart",
            "reward_model": {"style": "rule", "ground_truth": example.ground_truth},
            "extra_info": {"split": split, "index": index},
        }
        for index, example in enumerate(examples)
    ]


def write(folder: Path, *, steps: int = 1200, train_rows: int = 2048, val_rows: int = 128) -> None:
    """Write model/, train.parquet and val.parquet. They are made in a temporary folder, so that all or none exist."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A second thread does not help with such small matrices, and one thread gives the same model on every machine.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        warm_up(model, tokenizer, steps=steps)
        new = Path(scratch) / "made"
        model.save_pretrained(new / "model")
        tokenizer.save_pretrained(new / "model")
        for split, count in (("train", train_rows), ("val", val_rows)):
            pandas.DataFrame(rows(count, split=split)).to_parquet(new / f"{split}.parquet")
        os.replace(new, folder)


def main() -> None:
    """Make the folder unless it exists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("data/quickstart"), help="output folder (default: %(default)s)"
    )
    folder = parser.parse_args().folder
    if folder.exists():
        print(f"note: {folder} already exists and is kept. Remove the folder to generate it again.")
    else:
        write(folder)
        print(f"The model and the data were written to {folder}.")


if __name__ == "__main__":
    main()
