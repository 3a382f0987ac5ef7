"""A run cut down: its models, and its configuration."""

import argparse
import json

import pytest
import torch
from omegaconf import OmegaConf

from tests.facts import facts
from tests.recipes.launchers import RECIPES
from verl_ext.checks.configuration import composed
from verl_ext.cli import add_configuration
from verl_ext.cpu.miniature import cut_down, make_model, rehearsed
from verl_ext.errors import ConfigurationError


@pytest.fixture
def compose():
    """The configuration of a command line, and of its rehearsal."""

    def run(folder, *words, responses=None):
        parser = argparse.ArgumentParser()
        add_configuration(parser)
        with composed(parser.parse_intermixed_args(words)) as user:
            return user, *rehearsed(user, folder, responses)

    return run


def test_a_model_keeps_its_architecture_its_vocabulary_and_both_kinds_of_layers():
    qwen = {"model_type": "qwen3_next", "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 2}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    small = cut_down({**qwen, "num_hidden_layers": 48, "num_experts": 512, "layer_types": kinds * 12})
    assert (small["model_type"], small["vocab_size"]) == ("qwen3_next", 151936)
    assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    assert small["num_hidden_layers"] == len(small["layer_types"]) == 2
    assert set(small["layer_types"]) == set(kinds)


def test_the_miniature_is_random_by_a_seed_and_has_the_tokenizer(tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = OmegaConf.create({"model": {"path": str(tiny / "model")}})
    made = []
    for name in ("one", "two"):
        make_model(config, "model", tmp_path / name)
        made.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict())
    given = AutoModelForCausalLM.from_pretrained(tiny / "model")
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    weight = "model.embed_tokens.weight"
    assert made[0][weight].shape == (given.config.vocab_size, 64)
    assert not torch.equal(made[0][weight], given.state_dict()[weight])
    text = [{"role": "user", "content": "a"}]
    one, two = (AutoTokenizer.from_pretrained(folder) for folder in (tiny / "model", tmp_path / "one"))
    assert one.apply_chat_template(text) == two.apply_chat_template(text)


def test_the_layer_makes_a_run_for_gpus_small_and_keeps_what_is_the_users(compose, tmp_path):
    words = ("--config-path", str(RECIPES), "--config-name", "math/hadw", "actor_rollout_ref.rollout.temperature=0.7")
    user, config, left_out = compose(tmp_path, *words)
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert (rollout.name, rollout.n) == ("embedded", 4)
    assert (config.data.max_response_length, rollout.response_length) == (64, 64)
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (4, 4)
    assert (actor.strategy, config.trainer.device, config.trainer.n_gpus_per_node) == ("fsdp2", "cpu", 1)
    assert left_out == []
    for place in ("algorithm", "reward", "data.max_prompt_length", "data.train_files", "actor_rollout_ref.actor.optim"):
        kept = OmegaConf.select(config, place)
        if OmegaConf.is_dict(kept):
            kept = {**kept, "num_workers": 8} if place == "reward" else dict(kept)
            assert kept == dict(OmegaConf.select(user, place))
        else:
            assert kept == OmegaConf.select(user, place)
    assert rollout.temperature == 0.7
    assert user.actor_rollout_ref.rollout.n == 8  # the user's own is as it was


def test_another_engine_is_refused_and_what_is_left_out_is_said(compose, tmp_path):
    words = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm")
    words += ("actor_rollout_ref.actor.use_dynamic_bsz=True",)
    with pytest.raises(ConfigurationError, match="model_engine=dp"):
        compose(tmp_path, "model_engine=megatron", *words)
    _, config, left_out = compose(tmp_path, *words, "actor_rollout_ref.model.lora_rank=8")
    assert left_out == ["actor_rollout_ref.model.lora_rank=8"]
    assert config.actor_rollout_ref.model.lora_rank == 0


def test_a_disk_without_space_is_not_reported_as_a_model_that_cannot_be_read(tiny, tmp_path, monkeypatch):
    from transformers import PreTrainedModel

    def full(*_given, **_more):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    config = OmegaConf.create({"model": {"path": str(tiny / "model")}})
    with pytest.raises(ConfigurationError, match=facts("trainer.default_local_dir", "No space left")) as error:
        make_model(config, "model", tmp_path / "made")
    assert "model.path" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        (None, "model.path"),
        ({"model_type": "qwen2_5_vl"}, "model.path"),
        ({"model_type": "qwen3_next", "vocab_size": 64, "num_experts": 4, "num_hidden_layers": 4}, "Qwen3Next"),
    ],
)
def test_a_model_that_cannot_be_made_small_is_refused(tiny, tmp_path, monkeypatch, config, fact):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    place = {"path": str(tmp_path), "tokenizer_path": str(tiny / "model")}
    with pytest.raises(ConfigurationError, match=fact):
        make_model(OmegaConf.create({"model": place}), "model", tmp_path / "made")


def test_given_responses_and_the_reward_manager_keep_the_length_of_the_run(compose, tmp_path):
    words = ("--config-path", str(RECIPES), "--config-name", "gsm8k/gdpo")
    _, config, _ = compose(tmp_path, *words, responses=tmp_path / "responses.jsonl")
    assert config.data.max_response_length == 1024
    given = config.actor_rollout_ref.rollout.engine_kwargs.embedded.responses
    assert given == str(tmp_path / "responses.jsonl")
    _, config, _ = compose(tmp_path, *words, "+reward.reward_kwargs.max_resp_len=${data.max_response_length}")
    assert (config.reward.reward_kwargs.max_resp_len, config.data.max_response_length) == (1024, 64)
