"""A scaled-down run: its models, and its configuration."""

import argparse
import json

import pytest
import torch
from omegaconf import OmegaConf

from tests.facts import facts
from tests.recipes.launchers import RECIPES
from verl_ext.checks.configuration import composed
from verl_ext.cli import add_configuration
from verl_ext.cpu.miniature import make_model, scale_down_model, scale_down_run
from verl_ext.errors import ConfigurationError

VLLM_RUN = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm")
DYNAMIC_BATCHES = "actor_rollout_ref.actor.use_dynamic_bsz=True"


@pytest.fixture
def scale_down(tmp_path):
    """Return a function that takes a command line.

    It returns the configuration of the run and of its rehearsal, and the settings that are left out.
    """

    def compose(*words, responses=None):
        parser = argparse.ArgumentParser()
        add_configuration(parser)
        with composed(parser.parse_intermixed_args(words)) as user:
            return user, *scale_down_run(user, tmp_path, responses)

    return compose


def recipe(name):
    """The arguments that select a recipe."""
    return "--config-path", str(RECIPES), "--config-name", name


def model_section(path, **settings):
    """A configuration whose section `model` names a model."""
    return OmegaConf.create({"model": {"path": str(path), **settings}})


def test_a_model_keeps_architecture_vocabulary_and_both_kinds_of_layers():
    layer_types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12
    qwen3_next = {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "layer_types": layer_types,
    }
    small = scale_down_model(qwen3_next)
    assert (small["model_type"], small["vocab_size"]) == ("qwen3_next", 151936)
    assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    assert small["num_hidden_layers"] == len(small["layer_types"]) == 2
    assert set(small["layer_types"]) == set(layer_types)


def test_the_small_model_has_random_weights_from_a_fixed_seed(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    for name in ("first", "second"):
        make_model(model_section(tiny / "model"), "model", tmp_path / name)
    first, second, original = (
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in (tmp_path / "first", tmp_path / "second", tiny / "model")
    )
    second_weights = second.state_dict()
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second_weights[name]), name
    embeddings, original_embeddings = (model.get_input_embeddings().weight for model in (first, original))
    assert embeddings.shape == (original.config.vocab_size, 64)
    assert not torch.equal(embeddings, original_embeddings)


def test_the_small_model_has_the_tokenizer_and_chat_template_of_the_run(tiny, tmp_path):
    from transformers import AutoTokenizer

    make_model(model_section(tiny / "model"), "model", tmp_path / "small")
    messages = [{"role": "user", "content": "a"}]
    prompts = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(messages)
        for folder in (tiny / "model", tmp_path / "small")
    ]
    assert prompts[0] == prompts[1]


def test_a_run_for_gpus_becomes_small_and_runs_on_the_cpu(scale_down):
    user, config, left_out = scale_down(*recipe("math/hadw"))
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert (rollout.name, rollout.n) == ("embedded", 4)
    assert (config.data.max_response_length, rollout.response_length) == (64, 64)
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (4, 4)
    assert (actor.strategy, config.trainer.device, config.trainer.n_gpus_per_node) == ("fsdp2", "cpu", 1)
    assert left_out == []
    assert user.actor_rollout_ref.rollout.n == 8  # the user's configuration does not change


@pytest.mark.parametrize("section", ["algorithm", "actor_rollout_ref.actor.optim"])
def test_the_rehearsal_keeps_the_users_algorithm_and_optimizer(scale_down, section):
    user, config, _ = scale_down(*recipe("math/hadw"))
    assert dict(OmegaConf.select(config, section)) == dict(OmegaConf.select(user, section))


def test_the_rehearsal_keeps_the_users_reward_data_and_sampling(scale_down):
    user, config, _ = scale_down(*recipe("math/hadw"), "actor_rollout_ref.rollout.temperature=0.7")
    assert {**config.reward, "num_workers": 8} == dict(user.reward)
    assert config.data.max_prompt_length == user.data.max_prompt_length
    assert config.data.train_files == user.data.train_files
    assert config.actor_rollout_ref.rollout.temperature == 0.7


def test_another_engine_is_rejected(scale_down):
    with pytest.raises(ConfigurationError, match="model_engine=dp"):
        scale_down("model_engine=megatron", *VLLM_RUN, DYNAMIC_BATCHES)


def test_settings_that_are_left_out_are_switched_off_and_reported(scale_down):
    _, config, left_out = scale_down(*VLLM_RUN, DYNAMIC_BATCHES, "actor_rollout_ref.model.lora_rank=8")
    assert left_out == ["actor_rollout_ref.model.lora_rank=8"]
    assert config.actor_rollout_ref.model.lora_rank == 0


def test_a_rehearsal_of_separate_async_runs_colocate_async_without_another_process(scale_down):
    separate = (
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        "+actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=my_engine",
    )
    _, config, _ = scale_down(*VLLM_RUN, DYNAMIC_BATCHES, *separate)
    rollout = config.actor_rollout_ref.rollout
    assert config.trainer.v1.trainer_mode == "colocate_async"
    assert rollout.nnodes == 0
    assert rollout.checkpoint_engine.backend == "naive"
    assert rollout.checkpoint_engine.custom_backend_module is None


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_rehearsal_keeps_the_other_trainer_modes(scale_down, mode):
    _, config, _ = scale_down(*VLLM_RUN, DYNAMIC_BATCHES, f"trainer.v1.trainer_mode={mode}")
    assert config.trainer.v1.trainer_mode == mode


def test_a_full_disk_is_not_reported_as_an_unreadable_model(tiny, tmp_path, monkeypatch):
    from transformers import PreTrainedModel

    def raise_no_space_left(*_arguments, **_settings):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", raise_no_space_left)
    with pytest.raises(ConfigurationError, match=facts("trainer.default_local_dir", "No space left")) as error:
        make_model(model_section(tiny / "model"), "model", tmp_path / "small")
    assert "model.path" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        pytest.param(None, "model.path", id="no model"),
        pytest.param({"model_type": "qwen2_5_vl"}, "model.path", id="a model that reads images"),
        pytest.param(
            {"model_type": "qwen3_next", "vocab_size": 64, "num_experts": 4, "num_hidden_layers": 4},
            "Qwen3Next",
            id="linear attention",
        ),
    ],
)
def test_a_model_that_cannot_be_scaled_down_is_rejected(tiny, tmp_path, monkeypatch, config, fact):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    run_config = model_section(tmp_path, tokenizer_path=str(tiny / "model"))
    with pytest.raises(ConfigurationError, match=fact):
        make_model(run_config, "model", tmp_path / "small")


def test_given_responses_keep_the_response_length_of_the_run(scale_down, tmp_path):
    _, config, _ = scale_down(*recipe("gsm8k/gdpo"), responses=tmp_path / "responses.jsonl")
    assert config.data.max_response_length == 1024
    file = config.actor_rollout_ref.rollout.engine_kwargs.embedded.responses
    assert file == str(tmp_path / "responses.jsonl")


def test_the_reward_manager_keeps_the_response_length_of_the_run(scale_down):
    reference = "+reward.reward_kwargs.max_resp_len=${data.max_response_length}"
    _, config, _ = scale_down(*recipe("gsm8k/gdpo"), reference)
    assert config.reward.reward_kwargs.max_resp_len == 1024
    assert config.data.max_response_length == 64
