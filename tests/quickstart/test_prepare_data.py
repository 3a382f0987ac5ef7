from __future__ import annotations

import os
import random
from pathlib import Path

import pandas
import pytest

from recipes.quickstart import prepare_data
from recipes.quickstart.prepare_data import batches, draw, encode, make_model, make_tokenizer, rows, write
from verl_ext.rewards import tool_calling

BASE = Path(prepare_data.__file__).with_name("base.yaml")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_a_saved_tokenizer_gives_every_text_back(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    make_model(tokenizer).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(tokenizer)
    rng = random.Random(0)
    for _ in range(200):
        text = draw(rng).answer
        tokens = loaded.encode(text, add_special_tokens=False)
        assert loaded.unk_token_id not in tokens
        assert loaded.decode([*tokens, loaded.eos_token_id], skip_special_tokens=True) == text


def test_prompts_and_answers_fit_into_the_lengths_of_the_recipe(tokenizer):
    import yaml

    data = yaml.safe_load(BASE.read_text())["data"]
    rng = random.Random(0)
    for _ in range(500):
        prompt, answer = encode(tokenizer, draw(rng))
        assert len(prompt) <= data["max_prompt_length"]
        assert len(answer) <= data["max_response_length"]


def test_the_labels_are_the_answers_tokens_and_nothing_of_the_prompt_or_padding(tokenizer):
    batch = next(batches(tokenizer, seed=3))
    rng = random.Random(3)
    for row in range(4):
        prompt, answer = encode(tokenizer, draw(rng))
        labels = batch["labels"][row].tolist()
        assert labels[: len(prompt)] == [-100] * len(prompt)
        assert labels[len(prompt) : len(prompt) + len(answer)] == answer
        assert set(labels[len(prompt) + len(answer) :]) <= {-100}
        assert int(batch["attention_mask"][row].sum()) == len(prompt) + len(answer)


def test_the_rows_are_what_the_reward_reads_and_each_split_has_its_own():
    drawn = rows(300, split="train")
    for row in drawn:
        tool_calling.check_ground_truth(row["reward_model"]["ground_truth"])
    assert drawn == rows(300, split="train")
    assert drawn != rows(300, split="val")


def test_20_percent_of_the_answers_are_right_and_40_percent_wrong_in_each_of_the_two_rewards():
    rng = random.Random(0)
    examples = [draw(rng) for _ in range(4000)]
    scores = [tool_calling.compute_score("", each.answer, each.ground_truth) for each in examples]
    kinds = [(score["correctness"] == 3.0, score["format"] == 1.0) for score in scores]
    # A share p of 4000 draws has standard deviation sqrt(p(1-p)/4000) < 0.008.
    assert kinds.count((True, True)) / 4000 == pytest.approx(0.2, abs=0.03)
    assert kinds.count((True, False)) / 4000 == pytest.approx(0.4, abs=0.03)
    assert kinds.count((False, True)) / 4000 == pytest.approx(0.4, abs=0.03)


SMALL = {"steps": 2, "train_rows": 8, "val_rows": 4}


def test_the_same_code_makes_the_same_model_and_data(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, **SMALL)
    first, second = (tmp_path / name / "model/model.safetensors" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert [len(pandas.read_parquet(tmp_path / "a" / f"{split}.parquet")) for split in ("train", "val")] == [8, 4]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
