"""A run cut down, and what is read from what the runs of a rehearsal left."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from omegaconf import OmegaConf

import verl_ext
from tests.facts import facts, says
from tests.recipes.launchers import RECIPES
from verl_ext.cpu.miniature import cut_down, make_model, rehearsed
from verl_ext.cpu.rehearse import (
    FAILED,
    LOOK,
    MARKER,
    OK,
    Rehearsal,
    emptied,
    of_answers,
    of_prompt,
    of_resume,
    of_training,
    start,
)
from verl_ext.errors import ConfigurationError
from verl_ext.integration.checks.command import add_configuration, composed


@pytest.fixture
def compose():
    """The configuration of a command line, and of its rehearsal."""

    def run(folder, *words, answers=None):
        parser = argparse.ArgumentParser()
        add_configuration(parser)
        with composed(parser.parse_intermixed_args(words)) as user:
            return user, *rehearsed(user, folder, answers)

    return run


def test_a_model_keeps_its_architecture_its_vocabulary_and_both_kinds_of_layers():
    qwen = {"model_type": "qwen3_next", "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 2}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    small = cut_down({**qwen, "num_hidden_layers": 48, "num_experts": 512, "layer_types": kinds * 12})
    assert (small["model_type"], small["vocab_size"]) == ("qwen3_next", 151936)
    assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    assert small["num_hidden_layers"] == len(small["layer_types"]) == 2
    assert set(small["layer_types"]) == set(kinds)


def test_a_model_of_images_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    with pytest.raises(ConfigurationError, match="model.path"):
        make_model(OmegaConf.create({"model": {"path": str(tmp_path)}}), "model", tmp_path / "made")


def test_a_model_that_the_rollout_cannot_generate_from_is_refused_before_a_run(tiny, tmp_path):
    config = {"model_type": "qwen3_next", "vocab_size": 64, "hidden_size": 64, "num_experts": 4, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    place = {"path": str(tmp_path), "tokenizer_path": str(tiny / "model")}
    with pytest.raises(ConfigurationError, match="Qwen3Next"):
        make_model(OmegaConf.create({"model": place}), "model", tmp_path / "made")


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


def test_a_model_that_is_nowhere_is_refused_by_its_setting(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = OmegaConf.create({"model": {"path": str(tmp_path / "nobody/nothing")}})
    with pytest.raises(ConfigurationError, match="model.path"):
        make_model(config, "model", tmp_path / "made")


def test_the_layer_makes_a_run_for_gpus_small_and_keeps_what_is_the_users(compose, tmp_path):
    words = ("--config-path", str(RECIPES), "--config-name", "math/hadw", "actor_rollout_ref.rollout.temperature=0.7")
    user, config, left_out = compose(tmp_path, *words)
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert (rollout.name, rollout.n, config.data.max_response_length, rollout.response_length) == (
        "embedded",
        4,
        64,
        64,
    )
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


def test_given_answers_keep_the_length_of_the_run(compose, tmp_path):
    words = ("--config-path", str(RECIPES), "--config-name", "gsm8k/gdpo")
    _, config, _ = compose(tmp_path, *words, answers=tmp_path / "answers.jsonl")
    assert config.data.max_response_length == 1024
    given = config.actor_rollout_ref.rollout.engine_kwargs.embedded.answers
    assert given == str(tmp_path / "answers.jsonl")


def test_sizes_that_verl_refuses_are_refused_before_they_are_cut_down(compose, tmp_path):
    words = ("--config-path", str(RECIPES), "--config-name", "quickstart/gdpo", "data.train_batch_size=8")
    words += ("actor_rollout_ref.actor.use_dynamic_bsz=False", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
    with pytest.raises(ConfigurationError, match="ppo_mini_batch_size"):
        compose(tmp_path, *words, "actor_rollout_ref.actor.ppo_mini_batch_size=16")


def test_the_reward_manager_keeps_a_length_that_it_reads_from_the_data(compose, tmp_path):
    words = ("--config-path", str(RECIPES), "--config-name", "gsm8k/gdpo")
    _, config, _ = compose(tmp_path, *words, "+reward.reward_kwargs.max_resp_len=${data.max_response_length}")
    assert (config.reward.reward_kwargs.max_resp_len, config.data.max_response_length) == (1024, 64)


def test_a_variable_of_the_run_may_be_a_number(tmp_path, monkeypatch):
    variables = {"runtime_env": {"env_vars": {"NCCL_NVLS_ENABLE": 0}}}
    config = OmegaConf.create({"trainer": {}, "ray_kwargs": {"ray_init": variables}})
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    assert start(tmp_path / "run", config, minutes=1).status == 0


def test_another_engine_is_refused_and_what_is_left_out_is_said(compose, tmp_path):
    words = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm")
    words += ("actor_rollout_ref.actor.use_dynamic_bsz=True",)
    with pytest.raises(ConfigurationError, match="model_engine=dp"):
        compose(tmp_path, "model_engine=megatron", *words)
    _, config, left_out = compose(tmp_path, *words, "actor_rollout_ref.model.lora_rank=8")
    assert left_out == ["actor_rollout_ref.model.lora_rank=8"]
    assert config.actor_rollout_ref.model.lora_rank == 0


USER = OmegaConf.create(
    {
        "data": {"train_batch_size": 8, "max_prompt_length": 64, "filter_overlong_prompts": True},
        "reward": {"custom_reward_function": {"path": "mine.py"}},
        "algorithm": {"filter_groups": {"enable": True, "metric": "acc"}},
        "actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": "single_turn_agent"}}},
    }
)
LOADED = ["dataset len: 100", "filter dataset len: 90", "dataset len: 10", "filter dataset len: 10"]
STARTED = [*LOADED, "Training Progress:   0%|          | 0/3"]
RAISED = [
    "ERROR:2026-01-01 00:00:00,000:Error in _run_prompt for uid=1",
    "Traceback (most recent call last):",
    '  File "/venv/site-packages/verl/experimental/reward_loop/reward_loop.py", line 5, in compute_score',
    "ray.exceptions.RayTaskError(KeyError): ray::RewardLoopWorker.compute_score()",
    '  File "/venv/site-packages/verl/experimental/reward_loop/reward_loop.py", line 9, in run_single',
    '  File "/home/user/mine.py", line 12, in compute_score',
    "KeyError: 'answer'",
]


@pytest.fixture
def left(tmp_path):
    """What a run left: its log as Ray writes it, and metrics of each step."""

    def write(lines, steps=(), *, name="run", status=0, **metrics):
        folder = tmp_path / name
        folder.mkdir()
        worker = "\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m "
        (folder / "log.txt").write_text("".join(f"{worker}{line}\n" for line in lines))
        rewards = {"critic/score/min": 0.0, "critic/score/mean": 0.5, "critic/score/max": 1.0}
        rewards |= {"critic/advantages/min": -1.0, "critic/advantages/max": 1.0, **metrics}
        if steps:
            records = [{"step": step, "data": {**rewards, "perf/time": step}} for step in steps]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return Rehearsal(folder, status, 1.0)

    return write


def states(findings):
    return {stage: state for stage, state, _ in findings}


def text_of(findings, stage):
    return " ".join(text for name, state, text in findings if (name, state) == (stage, FAILED))


def test_a_message_that_the_chat_template_drops_is_said(tiny, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    prompt = [{"role": "system", "content": " be terse "}, {"role": "user", "content": "2+3"}]
    rows = [{"data_source": "x", "prompt": prompt, "reward_model": {"ground_truth": "5"}}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    user = OmegaConf.create({"data": {"train_files": str(tmp_path / "train.parquet"), "prompt_key": "prompt"}})
    each = "{% for message in messages %}{{ message['content'] | trim }}{% endfor %}"
    assert not [*of_prompt(user, tokenizer, each)]
    ((stage, state, text),) = of_prompt(user, tokenizer, each.replace("in messages", "in messages[1:]"))
    assert (stage, state) == ("prompt", LOOK)
    assert "system" in text
    with pytest.raises(ConfigurationError, match="chat template"):
        [*of_prompt(user, tokenizer, "{{ raise_exception('no system message') }}")]


def test_a_run_that_ends_reaches_every_stage(left):
    findings = list(of_training(left(STARTED, (1, 2, 3)), USER))
    assert set(states(findings).values()) == {OK}
    assert states(findings).keys() == {"data", "start", "train", "save"}


@pytest.mark.parametrize(
    ("lines", "steps", "stage"),
    [
        (["", "FileNotFoundError: no.parquet"], (), "data"),
        ([*LOADED, "ValueError: no such model"], (), "start"),
        ([*STARTED, "RuntimeError: no"], (), "train"),
        ([*STARTED, "INFO:Saving checkpoint to x", "PermissionError: x"], (1,), "save"),
        ([*STARTED, "RuntimeError: no"], (1, 2), "train"),
    ],
)
def test_the_first_stage_that_is_not_reached_fails_with_its_error(left, lines, steps, stage):
    findings = list(of_training(left(lines, steps, status=1), USER))
    assert next(name for name, state, _ in findings if state == FAILED) == stage
    assert lines[-1] in text_of(findings, stage)


@pytest.mark.parametrize(
    ("lines", "steps", "stage"), [((), (), "Ray"), (STARTED, (), "step 1"), (STARTED, (1, 2), "3 steps")]
)
def test_a_time_out_is_told_first_with_its_stage_whatever_error_the_log_has(left, lines, steps, stage):
    findings = list(of_training(left([*lines, "ValueError: harmless"], steps, status=None), USER))
    (text,) = [text for _, state, text in findings if state == FAILED]
    assert re.match(f"--minutes.*{stage}", text)
    assert text.index(stage) < text.index("ValueError: harmless")


@pytest.mark.parametrize(("scores", "dead"), [([1, 1, 0, 0], True), ([1, 0, 0, 0], False)])
def test_groups_without_a_difference_are_said(left, scores, dead):
    run = left(STARTED, (1, 2, 3))
    (run.folder / "rollouts").mkdir()
    rows = [{"step": 1, "input": "ab"[at // 2], "output": "x", "score": score} for at, score in enumerate(scores)]
    (run.folder / "rollouts/1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    user = OmegaConf.merge(USER, {"actor_rollout_ref": {"rollout": {"n": 2}}})
    looks = [stage for stage, state, _ in of_answers(run, user, given=False) if state == LOOK]
    assert looks == ["groups"] * dead


def test_given_answers_that_are_all_cut_are_said_with_the_setting(left):
    user = OmegaConf.merge(USER, {"actor_rollout_ref": {"rollout": {"n": 1}}, "data": {"max_response_length": 32}})
    cut, whole = (
        left(STARTED, (1, 2), name=f"{share}", **{"response_length/clip_ratio": share}) for share in (1.0, 0.9)
    )
    assert says([*of_answers(cut, user, given=True)], "data.max_response_length", 32)
    assert not [*of_answers(cut, user, given=False)]
    assert not [*of_answers(whole, user, given=True)]


def test_fewer_prompts_than_a_batch_of_the_run_fail_although_the_miniature_needs_less(left):
    few = ["dataset len: 100", "filter dataset len: 7", *STARTED[2:]]
    findings = list(of_training(left(few, (1, 2, 3)), USER))
    assert "7 of 100" in text_of(findings, "data")


def test_the_error_of_an_answer_is_said_with_the_users_line_although_verl_goes_on(left):
    findings = list(of_training(left([*STARTED, *RAISED, *RAISED], (1, 2, 3)), USER))
    text = text_of(findings, "reward")
    assert text.startswith("2 answers")
    assert "KeyError: 'answer'" in text
    assert "/home/user/mine.py:12" in text


PACKAGE = str(Path(verl_ext.__file__).parent)


@pytest.mark.parametrize(
    ("file", "place", "shown"),
    [
        ("/home/user/mine.py", "<module>", True),
        ("/home/user/mine.py", "<lambda>", True),
        ("/home/user/verl_ext/mine.py", "compute_score", True),
        (f"{PACKAGE}/rewards/tags.py", "compute_score", False),
        ("/usr/lib64/python3.11/asyncio/tasks.py", "run", False),
        ("<frozen runpy>", "_run_code", False),
        ("python/ray/_raylet.pyx", "ray._raylet.execute_task", False),
    ],
)
def test_the_line_of_an_error_is_the_last_of_the_users_own(left, file, place, shown):
    lines = [
        *STARTED,
        '  File "/home/user/first.py", line 3, in f',
        f'  File "{file}", line 7, in {place}',
        "KeyError: 1",
    ]
    expected = f"({file}:7)" if shown else "(/home/user/first.py:3)"
    assert expected in left(lines, status=1).failure("train")


def test_the_folder_of_a_rehearsal_is_emptied_and_another_is_left_alone(tmp_path):
    with emptied(tmp_path / "new/rehearsal"):
        (tmp_path / "new/rehearsal/train").mkdir()
    (tmp_path / "new/rehearsal/notes.txt").touch()
    with emptied(tmp_path / "new/rehearsal"):
        assert {path.name for path in (tmp_path / "new/rehearsal").iterdir()} == {MARKER, "notes.txt"}
    (tmp_path / "mine/train").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=facts("trainer.default_local_dir", tmp_path / "mine")):
        emptied(tmp_path / "mine")
    assert (tmp_path / "mine/train").exists()


def test_a_folder_that_cannot_be_written_is_told_by_its_setting(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=facts("trainer.default_local_dir", tmp_path / "file/rehearsal")):
        emptied(tmp_path / "file/rehearsal")


def test_a_second_rehearsal_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    program = "import pathlib, sys; from verl_ext.cpu.rehearse import emptied\n"
    program += "lock = emptied(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        first.stdout.readline()
        (tmp_path / "train").mkdir()
        with pytest.raises(ConfigurationError, match=facts("trainer.default_local_dir", tmp_path)):
            emptied(tmp_path)
        assert (tmp_path / "train").exists()
        first.kill()
    emptied(tmp_path).close()
    assert not (tmp_path / "train").exists()


def test_a_disk_without_space_is_not_told_as_a_model_that_cannot_be_read(tiny, tmp_path, monkeypatch):
    from transformers import PreTrainedModel

    def full(*_given, **_more):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    config = OmegaConf.create({"model": {"path": str(tiny / "model")}})
    with pytest.raises(ConfigurationError, match=facts("trainer.default_local_dir", "No space left")) as error:
        make_model(config, "model", tmp_path / "made")
    assert "model.path" not in str(error.value)


def test_a_step_that_does_not_end_hints_at_the_filter_of_groups(left):
    findings = list(of_training(left(STARTED, status=None), USER))
    assert findings[-1][:2] == ("train", LOOK)
    assert "filter_groups" in findings[-1][2]


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([*STARTED, "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."], 1),
        (["Exception: The current node timed out during startup."], 1),
        (STARTED, None),
    ],
)
def test_no_setting_is_named_beside_a_fault_of_the_machine(left, lines, status):
    user = OmegaConf.merge(USER, {"algorithm": {"filter_groups": {"enable": False}}})
    (failed,) = [text for _, state, text in of_training(left(lines, status=status), user) if state == FAILED]
    assert not re.search(r"actor_rollout_ref|algorithm|checkpoint|train_files", failed)


@pytest.mark.parametrize(
    ("again", "state"),
    [
        ({}, OK),
        ({"critic/score/mean": 0.5001}, OK),
        ({"critic/score/mean": 0.6}, FAILED),
        ({"critic/score/mean": float("nan")}, FAILED),
    ],
)
def test_the_resumed_step_is_compared_metric_by_metric(left, again, state):
    whole = left(STARTED, (1, 2, 3), name="whole")
    findings = list(of_resume(left(STARTED, (3,), **again), whole, USER))
    assert states(findings) == {"resume": OK, "repeat": state, "validate": OK}


def test_a_metric_that_is_nan_in_both_runs_is_the_same(left):
    nan = {"critic/score/mean": float("nan")}
    whole = left(STARTED, (1, 2, 3), name="whole", **nan)
    assert states(of_resume(left(STARTED, (3,), **nan), whole, USER))["repeat"] == OK


TOOLS = {"agent": {"default_agent_loop": "tool_agent"}, "multi_turn": {"enable": True}}


@pytest.mark.parametrize(
    "settings", [{"actor_rollout_ref": {"rollout": TOOLS}}, {"trainer": {"v1": {"trainer_mode": "colocate_async"}}}]
)
def test_tools_and_asynchronous_trainers_may_answer_otherwise_in_the_resumed_step(left, settings):
    whole = left(STARTED, (1, 2, 3), name="whole")
    user = OmegaConf.merge(USER, settings)
    again = left(STARTED, (3,), **{"critic/score/mean": 0.6})
    assert states(of_resume(again, whole, user))["repeat"] == LOOK


def test_tools_that_fail_or_are_never_called_are_said_although_verl_goes_on(left):
    user = OmegaConf.merge(USER, {"actor_rollout_ref": {"rollout": TOOLS}})
    raised = "WARNING:2026-01-01 00:00:00,000:Error executing tool 'search': 'query'"
    run = left([*STARTED, raised, raised], (1, 2, 3), **{"num_turns/max": 4})
    looks = [(stage, text) for stage, state, text in of_training(run, user) if state == LOOK]
    assert [(stage, text[:1]) for stage, text in looks] == [("tools", "2")]
    assert "Error executing tool 'search': 'query'" in looks[0][1]
    silent = left(STARTED, (1, 2, 3), name="silent", **{"num_turns/max": 2})
    assert any("no answer called a tool" in text for _, _, text in of_training(silent, user))
    assert not any("called a tool" in text for _, _, text in of_training(run, user))


def test_an_error_of_the_validation_is_its_own_stage(left):
    whole = left(STARTED, (1, 2, 3), name="whole")
    lines = [*STARTED, *RAISED, "INFO:Saving checkpoint to x", '  File "a.py", line 1, in _validate', "ValueError: x"]
    findings = list(of_resume(left(lines, status=1), whole, USER))
    assert states(findings) == {"resume": OK, "validate": FAILED}
    text = text_of(findings, "validate")
    assert "data.val_files" in text
    assert "ValueError: x" in text
