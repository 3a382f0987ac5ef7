from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.facts import facts
from verl_ext.cpu.tiny.make import Recipe, code, made, make
from verl_ext.cpu.tiny.model import IGNORED, batches, encode, make_model
from verl_ext.cpu.tiny.tokenizer import make_tokenizer
from verl_ext.errors import ConfigurationError

pytest.importorskip("transformers")


def test_a_saved_tokenizer_gives_every_text_back(task, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = make_tokenizer(task.words)
    tokenizer.save_pretrained(tmp_path)
    make_model(tokenizer, seed=0).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(tokenizer)
    rng = random.Random(0)
    for _ in range(200):
        example = task.draw(rng)
        tokens = loaded.encode(example.answer, add_special_tokens=False)
        assert loaded.unk_token_id not in tokens
        assert loaded.decode([*tokens, loaded.eos_token_id], skip_special_tokens=True) == example.answer


def test_prompts_and_answers_fit_into_the_lengths_that_verl_is_given(task):
    tokenizer = make_tokenizer(task.words)
    rng = random.Random(0)
    for _ in range(500):
        prompt, answer = encode(tokenizer, task.draw(rng))
        assert len(prompt) <= task.prompt_length
        assert len(answer) <= task.response_length


def test_the_model_has_the_vocabulary_of_its_tokenizer_and_heads_that_vllm_can_take(task):
    tokenizer = make_tokenizer(task.words)
    config = make_model(tokenizer, seed=0).config
    assert config.vocab_size == len(tokenizer)
    assert config.hidden_size // config.num_attention_heads == 32


def test_the_labels_are_the_answers_tokens_and_nothing_of_the_prompt_or_padding(task):
    tokenizer = make_tokenizer(task.words)
    batch = next(batches(task, tokenizer, random.Random(3)))
    rng = random.Random(3)
    for row in range(4):
        prompt, answer = encode(tokenizer, task.draw(rng))
        labels = batch["labels"][row].tolist()
        assert labels[: len(prompt)] == [IGNORED] * len(prompt)
        assert labels[len(prompt) : len(prompt) + len(answer)] == answer
        assert set(labels[len(prompt) + len(answer) :]) <= {IGNORED}
        assert int(batch["attention_mask"][row].sum()) == len(prompt) + len(answer)


SMALL = Recipe("sums", warm_up_steps=3, train_rows=8, val_rows=4)


def test_a_task_is_made_once_and_again_only_with_other_settings(tmp_path):
    import pandas

    folder = tmp_path / "sums"
    seen = []
    assert make(folder, SMALL, lambda step, loss: seen.append(step))
    assert seen == [1, 2, 3]
    assert set(made(folder)["rewards_after_warm_up"]) == {"correctness", "integer", "format"}
    table = pandas.read_parquet(folder / "train.parquet")
    assert len(table) == 8
    assert table["reward_model"][0]["ground_truth"].startswith("#### ")
    assert not make(folder, SMALL)
    assert make(folder, Recipe("sums", warm_up_steps=1, train_rows=5, val_rows=4))
    assert len(pandas.read_parquet(folder / "train.parquet")) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["sums"]


def test_a_task_is_made_again_by_other_code(tmp_path):
    folder = tmp_path / "sums"
    make(folder, replace(SMALL, code="older"))
    assert make(folder, SMALL)
    assert made(folder)["recipe"]["code"] == code() != "older"
    assert not make(folder, SMALL)


def test_the_same_recipe_makes_the_same_weights(tmp_path):
    for name in ("a", "b"):
        make(tmp_path / name, SMALL)
    first, second = (tmp_path / name / "model/model.safetensors" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_what_was_interrupted_leaves_nothing(tmp_path):
    def interrupt(step, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "sums", SMALL, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_another_process_made_meanwhile_is_taken(tmp_path):
    def other(step, loss):
        if not (tmp_path / "sums").exists():
            assert make(tmp_path / "sums", SMALL)

    assert not make(tmp_path / "sums", SMALL, other)
    assert [path.name for path in tmp_path.iterdir()] == ["sums"]


def test_an_older_task_is_whole_until_the_new_one_takes_its_place(tmp_path, monkeypatch):
    folder = tmp_path / "sums"
    make(folder, SMALL)
    files = {path.relative_to(folder) for path in folder.rglob("*")}
    seen = []
    replace = os.replace

    def watched(source, target):
        for place in (Path(source), Path(target)):
            seen.append({path.relative_to(place) for path in place.rglob("*")} if place.exists() else set())
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    make(folder, Recipe("sums", warm_up_steps=1, train_rows=8, val_rows=4))
    assert seen == [files, set(), files, set()]  # each move takes a whole task to an empty place


def test_a_folder_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match=facts(tmp_path, "not a tiny task")):
        make(tmp_path, SMALL)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_numbers_below_one_are_refused():
    with pytest.raises(ConfigurationError, match=facts("warm_up_steps", "at least 1", "found 0")):
        Recipe("sums", warm_up_steps=0)
