"""`verl-ext check`: the findings about a run and what it will do, without starting it."""

import pandas
import pytest

import verl_ext
from tests import fresh
from tests.checks.test_driver import main_ppo
from tests.facts import a_line_says, says
from verl_ext.cli import main

GRPO = "algorithm.adv_estimator=grpo"
DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz=True"
RESPONSES_PER_PROMPT = "actor_rollout_ref.rollout.n=8"
GDPO = ("+verl_ext=gdpo", "algorithm.rewards.keys=[acc,format]", RESPONSES_PER_PROMPT, DYNAMIC)
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
    """Return a function that runs `check` and returns its exit status, its output and its error output."""

    def run(*arguments):
        status = main(["check", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture(params=["--config", "--config-path and --config-name"])
def options_of_mine(request, tmp_path):
    """Return the options that name the file `mine.yaml`."""
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    if request.param == "--config":
        return ("--config", str(file))
    return ("--config-path", str(tmp_path), "algorithm.use_kl_in_reward=False", "--config-name", "mine")


def lines_by_name(output):
    """Return the lines of the summary by their first word, without it."""
    return {line.split()[0]: " ".join(line.split()[1:]) for line in output.splitlines()}


def test_check_prints_the_estimator_steps_rewards_and_loss(check, options_of_mine):
    status, out, _ = check(*options_of_mine)
    lines = lines_by_name(out)
    assert status == 0
    assert lines["estimator"] == "gdpo"
    assert lines["steps"] == "center, scale_by_std, weighted_sum, whiten over token"
    assert lines["rewards"] == "1 acc, 0.5 format where acc is at least 0.5"
    assert lines["loss"].startswith("vanilla, loss_agg_mode=token-mean")
    assert "--try-reward" in lines["not"]
    assert lines["version"].startswith(f"verl_ext {verl_ext.__version__}")


def test_relative_config_path_and_file_ending_are_read_as_by_verl(check):
    words = ("--config-path=config", "--config-name=ppo_trainer.yaml", GRPO, DYNAMIC)
    assert check(*words)[0] == 0


def test_removed_setting_of_verl_has_no_nearest_name(check):
    """`param_offload` is no misspelt `grad_offload`."""
    _, _, err = check("actor_rollout_ref.actor.fsdp_config.grad_offload=True")
    assert says(err, "grad_offload")
    assert "did you mean" not in err


def test_errors_are_printed_with_status_1(check):
    status, out, err = check(
        "algorithm.adv_estimator=gdpo", RESPONSES_PER_PROMPT, "+algorithm.gdop.whiten=token", DYNAMIC
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
def test_configuration_that_hydra_rejects_is_an_error(check, arguments, word):
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
def test_fix_for_an_unknown_setting_is_the_nearest_name_or_plus_signs(check, setting, facts):
    status, out, err = check(GRPO, setting)
    assert (status, out) == (1, "")
    assert says(err, *facts)
    assert says(err, f"+{setting}") == any(fact.startswith("+") and "=" in fact for fact in facts)


def test_nearest_name_of_a_preset_has_no_plus_sign(check):
    status, out, err = check(*GDPO, "algorithm.gdpo.whitten=token")
    assert (status, out) == (1, "")
    assert says(err, "algorithm.gdpo.whitten", "algorithm.gdpo.whiten")
    assert not says(err, "+algorithm.gdpo.whiten")
    assert check(*GDPO, "algorithm.gdpo.whiten=token")[0] == 0


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [
        ("trainer.total_epoch=1", "trainer.total_epochs"),
        ("trainer.use_legacy_worker_impl=disable", None),  # the code of verl may read it
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path=x", "MultiTurnConfig"),
        # A field of verl's class that no file of verl sets, near to `ppo_max_token_len_per_gpu`.
        ("actor_rollout_ref.actor.ppo_infer_max_token_len_per_gpu=4096", None),
        ("actor_rollout_ref.model.override_config.attn_implementation=sdpa", None),
    ],
)
def test_setting_with_a_plus_sign_has_a_warning_if_a_name_is_near(check, setting, nearest):
    status, out, _ = check(GRPO, RESPONSES_PER_PROMPT, DYNAMIC, f"+{setting}")
    assert status == 0
    has_warning = a_line_says(out, "warning", setting.partition("=")[0])
    if nearest is None:
        assert not has_warning
    else:
        assert has_warning
        assert a_line_says(out, "warning", nearest)


def test_error_of_verls_own_checks_is_reported(check):
    assert check(GRPO, DYNAMIC)[0] == 0
    micro_batch = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    status, out, _ = check(GRPO, micro_batch, "data.train_batch_size=8")
    assert status == 1
    assert a_line_says(out, "verl", "ppo_mini_batch_size")


def test_error_of_verls_own_checks_ends_a_rehearsal():
    micro_batch = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    assert main(["rehearse", "--rows", "0", GRPO, micro_batch, "data.train_batch_size=8"]) == 1


GAE = "algorithm.adv_estimator=gae"


def test_check_of_a_critic_does_not_ask_the_hugging_face_hub(check, monkeypatch):
    def load_tokenizer(*_args, **_options):
        raise AssertionError

    monkeypatch.setattr("verl.workers.config.model.hf_tokenizer", load_tokenizer)
    critic = ("critic.ppo_micro_batch_size_per_gpu=1", "critic.model.path=nobody/nothing")
    assert check(GAE, DYNAMIC, *critic)[0] == 0


def test_critic_without_a_micro_batch_size_is_an_error(check):
    critic = ("critic.use_dynamic_bsz=False", "critic.ppo_micro_batch_size_per_gpu=null")
    status, out, _ = check(GAE, DYNAMIC, *critic)
    assert status == 1
    assert a_line_says(out, "verl", "critic.micro_batch_size_per_gpu")


LORA_WITH_VLLM = (
    RESPONSES_PER_PROMPT,
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.rollout.name=vllm",
)
"""verl's own check of this run imports vllm, which is not installed."""


def test_check_of_verl_that_cannot_run_here_is_a_warning(check):
    status, out, _ = check(GRPO, DYNAMIC, *LORA_WITH_VLLM)
    assert status == 0
    assert says(out, "vllm", "1 warning")


def test_strict_makes_a_warning_an_error(check):
    status, _, _ = check(GRPO, DYNAMIC, *LORA_WITH_VLLM, "--strict")
    assert status == 1


@pytest.mark.parametrize("setting", ["trainer.save_freq=null", "trainer.test_freq=null"])
def test_invalid_frequency_hides_no_other_error(check, setting):
    status, out, _ = check(GRPO, DYNAMIC, "+algorithm.gdop.whiten=token", setting)
    assert status == 1
    assert says(out, "gdop")


@pytest.fixture
def train_file(tmp_path):
    """Return the override for a file of ten rows."""
    file = tmp_path / "train.parquet"
    pandas.DataFrame({"prompt": [1] * 10}).to_parquet(file)
    return f"data.train_files={file}"


@pytest.fixture
def run_of_6_steps(train_file, tmp_path):
    """Return the overrides of a run of three epochs of two steps, whose checkpoints are in `saved`."""
    return (
        GRPO,
        DYNAMIC,
        train_file,
        "data.train_batch_size=4",
        "trainer.total_epochs=3",
        f"trainer.default_local_dir={tmp_path}/saved",
    )


def save_checkpoint(folder, step):
    """Create the files from which verl finds the last checkpoint."""
    (folder / f"global_step_{step}").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_steps_and_checkpoints_of_a_new_run_are_printed(check, run_of_6_steps, tmp_path):
    _, out, _ = check(*run_of_6_steps, "trainer.save_freq=5")
    assert a_line_says(out, "start", "beginning")
    assert a_line_says(out, "trains", "6", "3", "10", "4")
    assert a_line_says(out, "saves", "every 5", f"{tmp_path}/saved")


def test_missing_files_and_modules_are_notes(check, run_of_6_steps, tmp_path):
    """The class of json exists. A file of another machine cannot be looked up."""
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools: [{class_name: no_such_module.Tool}, {class_name: json.JSONDecoder}]")
    _, out, _ = check(
        *run_of_6_steps,
        "data.val_files=hdfs://far/away",
        f"reward.custom_reward_function.path={tmp_path}/none.py",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tools}",
    )
    assert a_line_says(out, "note", f"{tmp_path}/none.py", "reward.custom_reward_function.path")
    assert a_line_says(out, "note", "no_such_module", str(tools))
    assert not a_line_says(out, "note", "hdfs")
    assert not a_line_says(out, "note", "json")


def test_finished_run_has_a_warning(check, run_of_6_steps, tmp_path):
    save_checkpoint(tmp_path / "saved", step=6)
    _, out, _ = check(*run_of_6_steps)
    assert a_line_says(out, "start", "step 6", f"{tmp_path}/saved/global_step_6")
    assert a_line_says(out, "warning", "trainer.resume_mode=disable")


def test_resumed_run_with_steps_left_has_no_warning(check, run_of_6_steps, tmp_path):
    save_checkpoint(tmp_path / "saved", step=6)
    _, out, _ = check(*run_of_6_steps, "trainer.total_epochs=4")
    assert a_line_says(out, "start", "step 6")
    assert not says(out, "trainer.resume_mode")


def test_run_that_does_not_resume_has_no_warning(check, run_of_6_steps, tmp_path):
    save_checkpoint(tmp_path / "saved", step=6)
    _, out, _ = check(*run_of_6_steps, "trainer.resume_mode=disable")
    assert not says(out, "trainer.resume_mode")


def test_number_of_steps_of_the_data_has_no_warning(check, run_of_6_steps):
    _, out, _ = check(*run_of_6_steps, "trainer.total_training_steps=6")
    assert not a_line_says(out, "warning", "trainer.total_training_steps")


def test_more_steps_than_the_data_has_are_warned_of_with_the_number_of_epochs(check, run_of_6_steps):
    _, out, _ = check(*run_of_6_steps, "trainer.total_training_steps=7")
    assert a_line_says(out, "warning", "trainer.total_training_steps=7", "6", "trainer.total_epochs=4")

    _, out, _ = check(*run_of_6_steps, "trainer.total_training_steps=7", "trainer.total_epochs=4")
    assert not a_line_says(out, "warning", "trainer.total_training_steps")
    assert a_line_says(out, "trains", "7")


@pytest.mark.parametrize(("trainer", "is_reached"), [((), False), (("trainer.use_v1=False",), True)], ids=str)
def test_ray_ppo_trainer_counts_the_batches_that_it_generates(check, train_file, tmp_path, trainer, is_reached):
    """Ten rows are two training batches of four prompts, and five generated batches of two."""
    _, out, _ = check(
        GRPO,
        DYNAMIC,
        train_file,
        "data.train_batch_size=4",
        "++data.gen_batch_size=2",
        "trainer.total_epochs=1",
        "trainer.total_training_steps=5",
        f"trainer.default_local_dir={tmp_path}/saved",
        *trainer,
    )
    assert says(out, "cannot be reached") != is_reached


def test_missing_column_of_prompts_is_an_error_without_a_trial(check, tmp_path):
    pandas.DataFrame({"messages": [1] * 10}).to_parquet(tmp_path / "train.parquet")
    run = (GRPO, DYNAMIC, f"data.train_files={tmp_path}/train.parquet")
    status, out, _ = check(*run)
    assert status == 1
    assert a_line_says(out, "error", "data.prompt_key=prompt", "'messages'")

    _, out, _ = check(*run, "data.prompt_key=messages")
    assert not a_line_says(out, "error", "data.prompt_key")

    # A dataset of the user reads the file in its own way.
    _, out, _ = check(*run, "data.custom_cls.path=mine.py", "data.custom_cls.name=Mine")
    assert not a_line_says(out, "error", "data.prompt_key")


@pytest.fixture
def validation_of_step_6(run_of_6_steps, tmp_path):
    """Return the overrides of a finished run that is validated once more, with no step left."""
    save_checkpoint(tmp_path / "saved", step=6)
    validation = ("trainer.val_only=True", "trainer.test_freq=7", "data.val_files=hdfs://far/away")
    return (*run_of_6_steps, "trainer.save_freq=5", *validation)


def test_run_that_only_validates_has_no_steps_and_no_warning(check, validation_of_step_6):
    _, out, _ = check(*validation_of_step_6)
    assert a_line_says(out, "start", "step 6")
    assert a_line_says(out, "trains", "never", "trainer.val_only=True")
    assert a_line_says(out, "saves", "never", "trainer.val_only=True")
    assert a_line_says(out, "validates", "before the first step", "hdfs://far/away")
    assert not says(out, "7")
    assert not says(out, "trainer.resume_mode")


def test_val_only_without_a_validation_before_training_has_no_effect(check, validation_of_step_6):
    _, out, _ = check(*validation_of_step_6, "trainer.val_before_train=False")
    assert says(out, "trainer.resume_mode=disable")


@pytest.mark.parametrize("name", ["train.parquet", "train.csv", "train.jsonl"])
@pytest.mark.parametrize("setting", ["data.train_files", "data.val_files"])
def test_unreadable_file_hides_no_other_finding(check, tmp_path, name, setting):
    (tmp_path / name).write_text("{x")
    status, out, _ = check(GRPO, DYNAMIC, "+verl_ex=gdpo", f"{setting}={tmp_path / name}")
    assert status == 1
    assert says(out, "verl_ex=gdpo", "estimator", "trains")


def test_rewards_of_a_run_with_an_invalid_setting_are_printed(check):
    status, out, _ = check(*GDPO, "+algorithm.gdpo.nothing=1")
    assert status == 1
    assert says(out, "rewards ", "1 acc, 1 format")
    assert not says(check(*GDPO, "+algorithm.rewards.nothing=1")[1], "the score")


def test_bug_of_verl_ext_is_not_reported_as_an_error_of_the_file(monkeypatch):
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
def test_invalid_file_is_an_error_that_names_it(check, tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    status, _, err = check("--config", str(tmp_path / "mine.yaml"))
    assert status == 1
    assert "mine" in err


CHECK_AND_EXIT_WITH_WHETHER_RAY_RUNS = """
import sys
from verl_ext.cli import main
main(["check", *sys.argv[1:]])
import ray
sys.exit(ray.is_initialized())
"""


def test_check_reports_the_errors_of_the_run_and_starts_no_ray(tmp_path):
    """The two errors are the value of epsilon and the place of the preset, which is after the file."""
    (tmp_path / "mine.yaml").write_text(MINE.replace("verl_ext: gdpo, _self_", "_self_, verl_ext: gdpo"))
    run = ("--config-path", str(tmp_path), "--config-name", "mine", "algorithm.gdpo.epsilon=0")
    started = main_ppo(tmp_path, *run, f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray")
    assert started.returncode == 1
    assert not (tmp_path / "ray").exists()

    checked = fresh.run(CHECK_AND_EXIT_WITH_WHETHER_RAY_RUNS, *run, folder=tmp_path)
    assert checked.returncode == 0
    errors = [line for line in checked.stdout.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    for error in errors:
        assert error.removeprefix("error: ") in started.stderr
