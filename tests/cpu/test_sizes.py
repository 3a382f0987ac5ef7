"""Threads, tokens and concurrent responses that fit a machine and a model."""

import json
import os

import pytest

from tests.cpu.test_checks import configuration
from verl_ext.cpu import sizes

SMOL_LM_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
MODEL_ON_HUB = "actor_rollout_ref.model.path=somebody/model"


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.delenv(sizes.THREADS, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})


@pytest.fixture
def config_with_sizes(tmp_path):
    """Return a function that sets the open sizes of a run with a model of 135 million parameters, or with changes."""

    def make(*overrides, **changes):
        (tmp_path / "config.json").write_text(json.dumps(SMOL_LM_135M | changes), encoding="utf-8")
        config = configuration(f"actor_rollout_ref.model.path={tmp_path}", *overrides)
        sizes.set_open_sizes(config)
        return config

    return make


def threads_of(config):
    return config.ray_kwargs.ray_init.runtime_env.env_vars[sizes.THREADS]


@pytest.mark.parametrize(("ranks", "expected"), [(1, "4"), (3, "1"), (8, "1")])
def test_the_cores_are_divided_among_the_ranks(ranks, expected, config_with_sizes):
    assert threads_of(config_with_sizes(f"trainer.n_gpus_per_node={ranks}")) == expected


def test_threads_of_the_configuration_or_the_shell_are_kept(config_with_sizes, monkeypatch):
    override = "++ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS='3'"
    assert threads_of(config_with_sizes(override)) == "3"
    monkeypatch.setenv(sizes.THREADS, "2")
    assert threads_of(config_with_sizes()) == "2"


def test_a_large_vocabulary_gets_smaller_micro_batches(config_with_sizes):
    config = config_with_sizes("data.max_prompt_length=256")
    tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    assert 768 <= tokens < 1500
    # verl's own settings refer to it.
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == tokens
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == tokens


SMALL_MODEL = {"vocab_size": 100, "num_hidden_layers": 2, "hidden_size": 64}


@pytest.mark.parametrize(
    ("overrides", "changes", "tokens"),
    [
        pytest.param(["data.max_prompt_length=100", "data.max_response_length=6000"], {}, 6100, id="a whole sequence"),
        pytest.param(["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=5000"], {}, 5000, id="the run's own value"),
        pytest.param([MODEL_ON_HUB], {}, sizes.MOST_TOKENS, id="a model on the Hugging Face Hub"),
        pytest.param([], SMALL_MODEL, sizes.MOST_TOKENS, id="a small model"),
    ],
)
def test_tokens_of_a_micro_batch(config_with_sizes, overrides, changes, tokens):
    config = config_with_sizes(*overrides, **changes)
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == tokens


VERLS_DEFAULT = 256


@pytest.mark.parametrize(
    ("overrides", "changes", "expected"),
    [
        # 480 tokens of 30 layers with 3 heads of 64 numbers, keys and values, 4 bytes each: 22 MB a response.
        pytest.param([], {}, int(1.5e9 / (480 * 30 * 3 * 64 * 2 * 4)), id="the model of 135 million parameters"),
        pytest.param([], {"num_key_value_heads": 9}, 22, id="three times as many heads"),
        pytest.param([], {"head_dim": 32}, 135, id="heads of half the size"),
        pytest.param([], {"num_hidden_layers": 1}, VERLS_DEFAULT, id="a small model"),
        pytest.param(["actor_rollout_ref.rollout.max_num_seqs=8"], {}, 8, id="the run's own value"),
        pytest.param([MODEL_ON_HUB], {}, VERLS_DEFAULT, id="a model on the Hugging Face Hub"),
    ],
)
def test_the_rollout_generates_as_many_responses_at_once_as_fit(overrides, changes, expected, config_with_sizes):
    config = config_with_sizes("data.max_prompt_length=320", "data.max_response_length=160", *overrides, **changes)
    assert config.actor_rollout_ref.rollout.max_num_seqs == expected
