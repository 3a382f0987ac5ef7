"""`verl-ext check`: the findings about a run and what it will do, without starting it."""

import pandas
import pytest

import verl_ext
from tests import fresh
from tests.checks.test_driver import main_ppo
from tests.facts import a_line_says, says
from verl_ext.cli import main

DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz=True"
GDPO = ("+verl_ext=gdpo", "algorithm.rewards.keys=[acc,format]", "actor_rollout_ref.rollout.n=8", DYNAMIC)
MINE = """
hydra: {searchpath: ['pkg://verl.trainer.config']}
defaults: [ppo_trainer, verl_ext: gdpo, _self_]
algorithm:
  rewards: {keys: [acc, format], weights: [1, 0.5], conditions: {format: {reward: acc, at_least: 0.5}}}
  gdpo: {whiten: token}
actor_rollout_ref: {actor: {use_dynamic_bsz: True}, rollout: {n: 8}}
"""


@pytest.fixture
def check(capsys):
    """Return the exit status, the output and the error output of one call."""

    def run(*arguments):
        status = main(["check", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_it_prints_the_run_as_it_will_be(check, tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)
    by_name = ("--config-path", str(tmp_path), "algorithm.use_kl_in_reward=False", "--config-name", "mine")
    for arguments in (("--config", str(tmp_path / "mine.yaml")), by_name):
        status, out, _ = check(*arguments)
        lines = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
        assert status == 0
        assert lines["estimator"] == "gdpo"
        assert lines["steps"] == "center, scale_by_std, weighted_sum, whiten over token"
        assert lines["rewards"] == "1 acc, 0.5 format where acc is at least 0.5"
        assert lines["loss"].startswith("vanilla, loss_agg_mode=token-mean")
        assert "--try-reward" in lines["not"]
        assert lines["version"].startswith(f"verl_ext {verl_ext.__version__}")


def test_a_relative_folder_and_an_ending_are_read_as_by_verl(check):
    words = ("--config-path=config", "--config-name=ppo_trainer.yaml", "algorithm.adv_estimator=grpo", DYNAMIC)
    assert check(*words)[0] == 0


def test_a_setting_that_is_gone_has_no_other_ones_name(check):
    """`param_offload` is no misspelt `grad_offload`."""
    _, _, err = check("actor_rollout_ref.actor.fsdp_config.grad_offload=True")
    assert says(err, "grad_offload")
    assert "did you mean" not in err


def test_errors_are_printed_and_end_in_status_1(check):
    status, out, err = check(
        "algorithm.adv_estimator=gdpo", "actor_rollout_ref.rollout.n=8", "+algorithm.gdop.whiten=token", DYNAMIC
    )
    assert (status, err) == (1, "")
    assert "2 errors" in out
    assert "algorithm.gdpo" in out
    assert "algorithm.rewards.keys" in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((*GDPO, "algorithm.gdpo.whitn=token"), "whitn"),
        (("+verl_ext=gdpoo",), "gdpoo"),
        (("--config", "no/such.yaml"), "such"),
        (("key",), "key"),
    ],
)
def test_what_hydra_cannot_compose_is_an_error(check, arguments, word):
    status, out, err = check(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert word in err


@pytest.mark.parametrize(
    ("setting", "facts"),
    [
        ("trainer.total_epoch=1", ("trainer.total_epoch", "trainer.total_epochs")),
        ("algorithm.gdpo.whitten=token", ("algorithm.gdpo.whitten", "++algorithm.gdpo.whiten")),
        ("trainer.use_legacy_worker_impl=disable", ("Remove", "++trainer.use_legacy_worker_impl=disable")),
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path=x", ("Remove", "MultiTurnConfig")),
        (
            "actor_rollout_ref.actor.ppo_infer_max_token_len_per_gpu=9",  # a field of the class that no file sets
            ("++actor_rollout_ref.actor.ppo_infer_max_token_len_per_gpu=9",),
        ),
        ("algorithm.rewards.accuracy_key=acc", ("++algorithm.rewards.accuracy_key=acc", "+verl_ext=gdpo")),
        ("reward.reward_kwargs.max_resp_len=3", ("++reward.reward_kwargs.max_resp_len=3",)),
        ("verl_ext=gdpo", ("+verl_ext=gdpo",)),
    ],
)
def test_for_a_setting_that_the_configuration_lacks_the_nearest_name_comes_before_a_plus_sign(check, setting, facts):
    status, out, err = check("algorithm.adv_estimator=grpo", setting)
    assert (status, out) == (1, "")
    assert says(err, *facts)
    assert says(err, f"+{setting}") == any(fact.startswith("+") and "=" in fact for fact in facts)


def test_the_nearest_name_of_a_preset_is_offered_without_a_plus_sign(check):
    status, out, err = check(*GDPO, "algorithm.gdpo.whitten=token")
    assert (status, out) == (1, "")
    assert says(err, "algorithm.gdpo.whitten", "algorithm.gdpo.whiten")
    assert not says(err, "+algorithm.gdpo.whiten")
    assert check(*GDPO, "algorithm.gdpo.whiten=token")[0] == 0


@pytest.mark.parametrize(
    ("setting", "near"),
    [
        ("trainer.total_epoch=1", "trainer.total_epochs"),
        ("trainer.use_legacy_worker_impl=disable", None),  # the code of verl may read it
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path=x", "MultiTurnConfig"),
        # A field of verl's class that no file of verl sets, near to `ppo_max_token_len_per_gpu`.
        ("actor_rollout_ref.actor.ppo_infer_max_token_len_per_gpu=4096", None),
        ("actor_rollout_ref.model.override_config.attn_implementation=sdpa", None),
    ],
)
def test_a_setting_with_a_plus_sign_is_warned_of_if_another_one_is_near(check, setting, near):
    status, out, _ = check("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", DYNAMIC, f"+{setting}")
    assert status == 0
    assert a_line_says(out, "warning", setting.partition("=")[0]) == (near is not None)
    assert near is None or a_line_says(out, "warning", near)


def test_what_verl_refuses_is_said_by_check_and_ends_a_rehearsal(check):
    given = ["algorithm.adv_estimator=grpo", DYNAMIC]
    assert check(*given)[0] == 0
    given[1] = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    status, out, _ = check(*given, "data.train_batch_size=8")
    assert status == 1
    assert a_line_says(out, "verl", "ppo_mini_batch_size")
    assert main(["rehearse", "--rows", "0", *given, "data.train_batch_size=8"]) == 1


def test_verls_check_of_a_critic_asks_no_hub(check, monkeypatch):
    def asked(*_args, **_options):
        raise AssertionError

    monkeypatch.setattr("verl.workers.config.model.hf_tokenizer", asked)
    critic = ["algorithm.adv_estimator=gae", DYNAMIC, "critic.ppo_micro_batch_size_per_gpu=1"]
    assert check(*critic, "critic.model.path=nobody/nothing")[0] == 0
    status, out, _ = check(*critic[:2], "critic.use_dynamic_bsz=False", "critic.ppo_micro_batch_size_per_gpu=null")
    assert status == 1
    assert a_line_says(out, "verl", "critic.micro_batch_size_per_gpu")


def test_what_verl_cannot_judge_here_is_no_error(check):
    lora = [
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.rollout.name=vllm",
    ]  # it imports vllm
    status, out, _ = check("algorithm.adv_estimator=grpo", DYNAMIC, *lora)
    assert status == 0
    assert says(out, "vllm", "1 warning")
    assert check("algorithm.adv_estimator=grpo", DYNAMIC, *lora, "--strict")[0] == 1


@pytest.mark.parametrize("setting", ["trainer.save_freq=null", "trainer.test_freq=null"])
def test_a_plan_that_cannot_be_made_hides_no_other_error(check, setting):
    status, out, _ = check("algorithm.adv_estimator=grpo", DYNAMIC, "+algorithm.gdop.whiten=token", setting)
    assert status == 1
    assert says(out, "gdop")


def test_it_says_where_a_run_begins_and_ends(check, tmp_path):
    pandas.DataFrame({"prompt": [1] * 10}).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: no_such_module.Tool}, {class_name: json.JSONDecoder}]")
    given = ["algorithm.adv_estimator=grpo", DYNAMIC, f"data.train_files={tmp_path}/train.parquet"]
    given += ["data.train_batch_size=4", "trainer.total_epochs=3", f"trainer.default_local_dir={tmp_path}/saved"]
    given += ["data.val_files=hdfs://far/away", f"reward.custom_reward_function.path={tmp_path}/none.py"]
    tools = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/tools.yaml"
    _, out, _ = check(*given, tools, "trainer.save_freq=5")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert says(lines["start"], "beginning")
    assert says(lines["trains"], "6", "3", "10", "4")
    assert says(lines["saves"], "every 5", f"{tmp_path}/saved")
    assert a_line_says(out, "note", f"{tmp_path}/none.py", "reward.custom_reward_function.path")
    assert a_line_says(out, "note", "no_such_module", f"{tmp_path}/tools.yaml")
    assert not a_line_says(out, "note", "hdfs")
    assert not a_line_says(out, "note", "json")
    (tmp_path / "saved/global_step_6").mkdir(parents=True)
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("6")
    _, out, _ = check(*given)
    assert a_line_says(out, "start", "step 6", f"{tmp_path}/saved/global_step_6")
    assert a_line_says(out, "warning", "trainer.resume_mode=disable")
    assert a_line_says(check(*given, "trainer.total_epochs=4")[1], "start", "step 6")
    assert not says(check(*given, "trainer.resume_mode=disable")[1], "trainer.resume_mode")


def test_more_steps_than_the_data_has_are_warned_of_with_the_number_of_epochs(check, tmp_path):
    pandas.DataFrame({"prompt": [1] * 10}).to_parquet(tmp_path / "train.parquet")
    given = ["algorithm.adv_estimator=grpo", DYNAMIC, f"data.train_files={tmp_path}/train.parquet"]
    given += ["data.train_batch_size=4", "trainer.total_epochs=3", f"trainer.default_local_dir={tmp_path}/saved"]
    assert not a_line_says(
        check(*given, "trainer.total_training_steps=6")[1], "warning", "trainer.total_training_steps"
    )
    _, out, _ = check(*given, "trainer.total_training_steps=7")
    assert a_line_says(out, "warning", "trainer.total_training_steps=7", "6", "trainer.total_epochs=4")
    fixed = check(*given, "trainer.total_training_steps=7", "trainer.total_epochs=4")[1]
    assert not a_line_says(fixed, "warning", "trainer.total_training_steps")
    assert a_line_says(fixed, "trains", "7")


def test_the_other_trainer_counts_the_batches_that_it_generates(check, tmp_path):
    pandas.DataFrame({"prompt": [1] * 10}).to_parquet(tmp_path / "train.parquet")
    given = ["algorithm.adv_estimator=grpo", DYNAMIC, f"data.train_files={tmp_path}/train.parquet"]
    given += ["data.train_batch_size=4", "trainer.total_epochs=1", "trainer.total_training_steps=5"]
    given += ["++data.gen_batch_size=2", f"trainer.default_local_dir={tmp_path}/saved"]
    assert says(check(*given)[1], "cannot be reached")
    assert not says(check(*given, "trainer.use_v1=False")[1], "cannot be reached")


def test_a_column_of_prompts_that_is_missing_is_found_without_a_trial(check, tmp_path):
    pandas.DataFrame({"messages": [1] * 10}).to_parquet(tmp_path / "train.parquet")
    given = ["algorithm.adv_estimator=grpo", DYNAMIC, f"data.train_files={tmp_path}/train.parquet"]
    status, out, _ = check(*given)
    assert status == 1
    assert a_line_says(out, "error", "data.prompt_key=prompt", "'messages'")
    assert not a_line_says(check(*given, "data.prompt_key=messages")[1], "error", "data.prompt_key")
    own = ("data.custom_cls.path=mine.py", "data.custom_cls.name=Mine")  # reads the file in its own way
    assert not a_line_says(check(*given, *own)[1], "error", "data.prompt_key")


def test_of_a_run_that_only_validates_it_says_so_and_asks_for_no_steps(check, tmp_path):
    """A finished run that is validated once more: no step is left, and none is wanted."""
    pandas.DataFrame({"prompt": [1] * 10}).to_parquet(tmp_path / "train.parquet")
    given = ["algorithm.adv_estimator=grpo", DYNAMIC, f"data.train_files={tmp_path}/train.parquet"]
    given += ["data.train_batch_size=5", "trainer.total_epochs=3", f"trainer.default_local_dir={tmp_path}"]
    given += ["trainer.val_only=True", "trainer.save_freq=5", "trainer.test_freq=7", "data.val_files=hdfs://far/away"]
    (tmp_path / "global_step_6").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    _, out, _ = check(*given)
    assert a_line_says(out, "start", "step 6")
    for word in ("trains", "saves"):
        assert a_line_says(out, word, "never", "trainer.val_only=True")
    assert a_line_says(out, "validates", "before the first step", "hdfs://far/away")
    assert not says(out, "7")
    assert not says(out, "trainer.resume_mode")
    assert says(check(*given, "trainer.val_before_train=False")[1], "trainer.resume_mode=disable")


@pytest.mark.parametrize("name", ["train.parquet", "train.csv", "train.jsonl"])
@pytest.mark.parametrize("setting", ["data.train_files", "data.val_files"])
def test_a_file_that_cannot_be_read_hides_no_other_finding(check, tmp_path, name, setting):
    (tmp_path / name).write_text("{x")
    given = ["algorithm.adv_estimator=grpo", DYNAMIC, "+verl_ex=gdpo"]
    status, out, _ = check(*given, f"{setting}={tmp_path / name}")
    assert status == 1
    assert says(out, "verl_ex=gdpo", "estimator", "trains")


def test_the_rewards_of_a_run_with_a_wrong_setting_are_not_called_the_score(check):
    status, out, _ = check(*GDPO, "+algorithm.gdpo.nothing=1")
    assert status == 1
    assert says(out, "rewards ", "1 acc, 1 format")
    assert not says(check(*GDPO, "+algorithm.rewards.nothing=1")[1], "the score")


def test_an_error_of_ours_while_a_configuration_is_used_is_not_reported_as_one_of_the_file(monkeypatch):
    monkeypatch.setattr("verl_ext.checks.command.judge", lambda config: [].pop())
    with pytest.raises(IndexError):
        main(["check", *GDPO])


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: {",
        "algorithm: grpo",
        "\x1b",
        "defaults: ppo_trainer",
        "a: " + "[" * 2000,
        MINE + "actor_rollout_ref:\n",
        MINE.replace("algorithm:\n", "algorithm: 1\nx:\n"),
    ],
)
def test_whatever_is_in_a_file_the_error_is_one_of_ours_and_names_it(check, tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    status, _, err = check("--config", str(tmp_path / "mine.yaml"))
    assert status == 1
    assert "mine" in err


def test_it_says_what_the_run_says_and_starts_no_ray(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE.replace("verl_ext: gdpo, _self_", "_self_, verl_ext: gdpo"))
    given = ("--config-path", str(tmp_path), "--config-name", "mine", "algorithm.gdpo.epsilon=0")
    ran = main_ppo(tmp_path, *given, f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray")
    code = f"import sys; from verl_ext.cli import main; main(['check', *{given}]); import ray; "
    judged = fresh.run(code + "sys.exit(ray.is_initialized())", folder=tmp_path)
    assert (ran.returncode, judged.returncode) == (1, 0)
    errors = [line for line in judged.stdout.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2  # the setting and the place of the preset
    assert all(line.removeprefix("error: ") in ran.stderr for line in errors)
    assert not (tmp_path / "ray").exists()
