"""The tokenizer and the data of the supervised warm-up of the quickstart."""

import random
from pathlib import Path

import pytest

from recipes.quickstart import prepare_data
from recipes.quickstart.prepare_data import batches, draw, encode, make_model, make_tokenizer

BASE = Path(prepare_data.__file__).with_name("base.yaml")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_saved_tokenizer_decodes_every_response_to_itself(tokenizer, tmp_path):
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


def test_prompts_and_responses_fit_into_the_lengths_of_the_recipe(tokenizer):
    import yaml

    data = yaml.safe_load(BASE.read_text())["data"]
    rng = random.Random(0)
    for _ in range(500):
        prompt, response = encode(tokenizer, draw(rng))
        assert len(prompt) <= data["max_prompt_length"]
        assert len(response) <= data["max_response_length"]


def test_labels_are_the_tokens_of_the_response(tokenizer):
    """All other labels are -100, which a cross-entropy loss ignores."""
    batch = next(batches(tokenizer, seed=3))
    rng = random.Random(3)
    for row in range(4):
        prompt, response = encode(tokenizer, draw(rng))
        end_of_response = len(prompt) + len(response)
        labels = batch["labels"][row].tolist()
        assert labels[: len(prompt)] == [-100] * len(prompt)
        assert labels[len(prompt) : end_of_response] == response
        assert set(labels[end_of_response:]) <= {-100}
        assert int(batch["attention_mask"][row].sum()) == end_of_response
