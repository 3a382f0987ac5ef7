import json
import os

import pytest
from omegaconf import OmegaConf

from tests.cpu.test_checks import configuration
from verl_ext.cpu import sizes

SMOL = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
VERLS_OWN = 256


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.delenv(sizes.THREADS, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})


@pytest.fixture
def filled(tmp_path):
    """Fills in the configuration of a model of 135 million parameters, or of one with changes."""

    def fill(*overrides, **changes):
        (tmp_path / "config.json").write_text(json.dumps(SMOL | changes), encoding="utf-8")
        config = configuration(f"actor_rollout_ref.model.path={tmp_path}", *overrides)
        sizes.fill(config)
        return config

    return fill


@pytest.mark.parametrize(("ranks", "expected"), [(1, "4"), (3, "1"), (8, "1")])
def test_the_cores_are_divided_among_the_ranks_unless_threads_are_set(ranks, expected, filled, monkeypatch):
    def threads(config):
        return config.ray_kwargs.ray_init.runtime_env.env_vars[sizes.THREADS]

    assert threads(filled(f"trainer.n_gpus_per_node={ranks}")) == expected
    assert threads(filled("++ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS='3'")) == "3"
    monkeypatch.setenv(sizes.THREADS, "2")
    assert threads(filled()) == "2"


def test_a_large_vocabulary_takes_smaller_micro_batches(filled):
    config = filled("data.max_prompt_length=256")
    tokens = OmegaConf.select(config, sizes.TOKENS)
    assert 768 <= tokens < 1500
    # verl's own settings refer to it.
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == tokens
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == tokens


@pytest.mark.parametrize(
    ("overrides", "changes", "tokens"),
    [
        (["data.max_prompt_length=100", "data.max_response_length=6000"], {}, 6100),  # a whole sequence
        ([f"{sizes.TOKENS}=5000"], {}, 5000),
        (["actor_rollout_ref.model.path=somebody/model"], {}, sizes.MOST_TOKENS),
        ([], {"vocab_size": 100, "num_hidden_layers": 2, "hidden_size": 64}, sizes.MOST_TOKENS),
    ],
)
def test_tokens_of_a_micro_batch(filled, overrides, changes, tokens):
    assert OmegaConf.select(filled(*overrides, **changes), sizes.TOKENS) == tokens


@pytest.mark.parametrize(
    ("overrides", "changes", "expected"),
    [
        # 480 tokens of 30 layers with 3 key heads of 64: 22 MB an answer.
        ([], {}, int(1.5e9 / (480 * 30 * 2 * 3 * 64 * 4))),
        ([], {"num_key_value_heads": 9}, 67 // 3),
        ([], {"head_dim": 32}, 135),
        ([], {"num_hidden_layers": 1}, VERLS_OWN),
        (["actor_rollout_ref.rollout.max_num_seqs=8"], {}, 8),
        (["actor_rollout_ref.model.path=somebody/model"], {}, VERLS_OWN),
    ],
)
def test_the_rollout_generates_as_many_answers_at_once_as_fit(overrides, changes, expected, filled):
    config = filled("data.max_prompt_length=320", "data.max_response_length=160", *overrides, **changes)
    assert config.actor_rollout_ref.rollout.max_num_seqs == expected
