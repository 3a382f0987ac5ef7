import random
from pathlib import Path

import pytest

from recipes.quickstart import prepare_data
from recipes.quickstart.prepare_data import batches, draw, encode, make_model, make_tokenizer

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
