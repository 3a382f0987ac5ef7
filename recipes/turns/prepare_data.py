"""Generate the model and the data of the task in data/turns. This takes less than a minute on one core.

    python recipes/turns/prepare_data.py

A prompt is one of eight letters. In each turn the model presses a key: `c+` continues and `c.` ends the session. The
tool returns the next letter. A session has at most three turns. The model has 200 thousand parameters and is first
trained with supervision on turns of which half press the correct key and half continue.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import pandas
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the script runs from every folder
from recipes.quickstart.prepare_data import make_model, make_tokenizer

KEYS = "abcdefgh"
RIGHT, GOES_ON = 0.5, 0.5
"""Fractions of the turns in the supervised training."""
TURNS = 3


def session(rng: random.Random) -> list[tuple[str, bool]]:
    """Sample a prompt, turns and results of the tool, each with whether the model generates it."""
    asked = rng.choice(KEYS)
    parts = [(f"<s>{asked}</s><s>", False)]
    for _ in range(TURNS):
        goes_on = rng.random() < GOES_ON
        key = asked if rng.random() < RIGHT else rng.choice(KEYS)
        parts.append((f"{key}{'+' if goes_on else '.'}</s>", True))
        if not goes_on:
            break
        asked = rng.choice(KEYS)
        parts.append((f"<s>\n{asked}\n</s><s>", False))
    return parts


def imitate(model: Any, tokenizer: Any, *, steps: int, size: int = 64) -> None:
    """Train with supervision on new sessions."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    rng = random.Random(0)
    for _ in range(steps):
        ids, labels = [], []
        for parts in (session(rng) for _ in range(size)):
            encoded = [(tokenizer.encode(text, add_special_tokens=False), own) for text, own in parts]
            ids.append(torch.tensor([token for tokens, _ in encoded for token in tokens]))
            labels.append(torch.tensor([token if own else -100 for tokens, own in encoded for token in tokens]))
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
        wanted = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=padded, attention_mask=(padded != tokenizer.pad_token_id).long(), labels=wanted).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def write(folder: Path, *, steps: int = 400) -> None:
    """Write model/, train.parquet and val.parquet."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(words=())
    model = make_model(tokenizer)
    imitate(model, tokenizer, steps=steps)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(1)
    for split, count in (("train", 1024), ("val", 64)):
        letters = [rng.choice(KEYS) for _ in range(count)]
        pandas.DataFrame(
            {
                "data_source": "keys",
                "prompt": [[{"role": "user", "content": letter}] for letter in letters],
                "reward_model": [{"style": "rule", "ground_truth": letter} for letter in letters],
                "extra_info": [{"index": index} for index in range(count)],
            }
        ).to_parquet(folder / f"{split}.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("data/turns"), help="output folder (default: %(default)s)")
    write(parser.parse_args().folder)
