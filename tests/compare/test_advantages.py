"""The advantages are those that the estimators give in a run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.compare import made
from verl_ext import Batch, Settings, build
from verl_ext.cli import main
from verl_ext.estimators.grpo import grpo

parquet = pytest.importorskip("pyarrow.parquet")
UIDS = [f"p{row // 4}" for row in range(12)]
SCORE = 2 * np.array(made.RIGHT) + np.array(made.FORM)


@pytest.fixture
def advantages(tmp_path, capsys):
    """Compare, and return what `--output` holds by column."""

    def compare(folder, *arguments):
        output = tmp_path / "out.parquet"
        assert main(["compare", str(folder), *arguments, "--output", str(output)]) == 0, capsys.readouterr().err
        return {name: values.to_numpy() for name, values in parquet.read_table(output).to_pandas().items()}

    return compare


def batch(keys=("score",), lengths=made.LENGTHS):
    rewards = {"score": SCORE, "right": made.RIGHT, "form": made.FORM}
    return Batch.of(
        np.stack([rewards[key] for key in keys], axis=1), UIDS, keys=keys, lengths=lengths, accuracy=made.RIGHT
    )


def expected(name, keys=("score",), **sections):
    settings = Settings.parse(sections | ({} if keys == ("score",) else {"rewards": {"keys": list(keys)}}))
    chain = grpo(settings) if name == "grpo" else build(name, settings)
    return chain(batch(keys)).advantages


BOTH = ("right", "form")
CASES = {
    "drgrpo": ("drgrpo", expected("drgrpo")),
    "dgpo": ("dgpo", expected("dgpo")),
    "gdpo": (f"gdpo {made.KEYS}", expected("gdpo", BOTH)),
    "gdpo over tokens": (
        f"gdpo algorithm.gdpo.whiten=token +{made.KEYS}",
        expected("gdpo", BOTH, gdpo={"whiten": "token"}),
    ),
    "gdpo by mad": (f"gdpo algorithm.gdpo.scale=mad {made.KEYS}", expected("gdpo", BOTH, gdpo={"scale": "mad"})),
    "dgpo on the sum": (
        f"dgpo   {made.KEYS}  algorithm.dgpo.dqw_temp=0.5",
        expected("dgpo", BOTH, dgpo={"dqw_temp": 0.5}),
    ),
    "grpo on the sum": (f"grpo {made.KEYS}", expected("grpo", BOTH)),
    "a list": (
        "[weigh_and_sum, centre, {step: scale_by_mad, epsilon: 0.5}]",
        expected("compose", compose={"steps": ["weigh_and_sum", "centre", {"step": "scale_by_mad", "epsilon": 0.5}]}),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_variant_has_the_advantages_of_its_estimator(case, advantages, tmp_path):
    text, wanted = CASES[case]
    # The lengths in characters are those in tokens here.
    found = advantages(made.write(tmp_path / "rollouts", made.entries()), text)
    (ours,) = (name for name in found if name.startswith("advantage/") and name != "advantage/grpo")
    np.testing.assert_allclose(found[ours], wanted, atol=1e-12)
    np.testing.assert_allclose(found["advantage/grpo"], expected("grpo"), atol=1e-12)


def test_a_setting_alone_holds_for_all(advantages, tmp_path):
    folder = made.write(tmp_path / "rollouts", made.entries())
    found = advantages(folder, "gdpo", "dgpo", made.KEYS, "drgrpo")
    for name in ("gdpo", "dgpo", "drgrpo"):
        np.testing.assert_allclose(found[f"advantage/{name}"], expected(name, BOTH), atol=1e-12)


def test_the_std_of_grpo_follows_verls_setting(advantages, tmp_path):
    folder = made.write(tmp_path / "rollouts", made.entries())
    found = advantages(folder, "gdpo", made.KEYS, "algorithm.norm_adv_by_std_in_grpo=False")
    np.testing.assert_allclose(found["advantage/grpo"], expected("grpo", norm_adv_by_std_in_grpo=False), atol=1e-12)


def test_history_goes_through_the_steps_in_order_whatever_the_files_are_called(advantages, tmp_path):
    """10.jsonl comes before 2.jsonl by name; one file may hold several steps, in any order."""
    chain, state, wanted = build("hadw", Settings()), None, []
    easy = [1.0 - value for value in made.RIGHT]
    for right in (made.RIGHT, easy, made.RIGHT):
        score = 2 * np.array(right) + np.array(made.FORM)
        result = chain(Batch.of(score[:, None], UIDS, accuracy=right), state)
        state, wanted = result.state, [*wanted, result.advantages]
    swapped = [
        line | {"acc": right, "score": 2 * right + line["form"]}
        for line, right in zip(made.entries(2), easy, strict=True)
    ]
    steps = [made.entries(1), swapped, made.entries(10)]
    apart = advantages(made.write(tmp_path / "apart", *steps), "hadw")
    np.testing.assert_allclose(apart["advantage/hadw"], np.concatenate(wanted), atol=1e-12)
    assert apart["step"].tolist() == [1] * 12 + [2] * 12 + [10] * 12
    mixed = made.write(tmp_path / "mixed", steps[2] + steps[0] + steps[1], name="all")
    np.testing.assert_array_equal(advantages(mixed, "hadw")["advantage/hadw"], apart["advantage/hadw"])


def test_dumped_advantages_are_read_with_their_tokens_and_accuracy(advantages, tmp_path):
    folder = made.dump(tmp_path, 3, 4)
    found = advantages(folder, "dgpo", "gdpo", made.KEYS)
    for name in ("dgpo", "gdpo"):
        wanted = expected(name, BOTH)
        np.testing.assert_allclose(found[f"advantage/{name}"], np.tile(wanted, 2), atol=1e-12)
    np.testing.assert_allclose(found["advantage/grpo"], np.tile(expected("grpo"), 2), atol=1e-12)
    assert found["tokens"].tolist() == made.LENGTHS * 2


def test_lengths_in_tokens_are_taken_where_the_lines_have_them(advantages, tmp_path, capsys):
    lines = [
        line | {"output": "y" * 10, "n": length} for line, length in zip(made.entries(), made.LENGTHS, strict=True)
    ]
    folder = made.write(tmp_path / "rollouts", lines)
    variant = f"gdpo algorithm.gdpo.whiten=token {made.KEYS}"
    label = "advantage/gdpo (1)"
    wanted = expected("gdpo", BOTH, gdpo={"whiten": "token"})
    np.testing.assert_allclose(advantages(folder, variant, "--length", "n")[label], wanted, atol=1e-12)
    assert "approximate" not in capsys.readouterr().out
    assert not np.allclose(advantages(folder, variant)[label], wanted)
    assert "gdpo (1) is approximate" in capsys.readouterr().out
    unknown = advantages(made.write(tmp_path / "other", made.without(lines, "output")), variant)
    assert "unknown" in capsys.readouterr().out
    assert "characters" not in unknown


def test_a_trajectory_in_several_parts_counts_once_with_all_its_characters(advantages, tmp_path):
    earlier = [line | {"output": "z" * 2, "score": 0.0, "right": 0.0, "form": 0.0} for line in made.entries()[:3]]
    later = [line | {"uid": f"{line['uid'][:-1]}1"} for line in made.entries()[:3]]
    folder = made.write(tmp_path / "rollouts", later + made.entries()[3:] + earlier)
    found = advantages(folder, "dgpo")
    assert len(found["step"]) == 12
    rows = np.argsort(found["line"])
    lengths = [length + 2 * (row < 3) for row, length in enumerate(made.LENGTHS)]
    assert found["characters"][rows].tolist() == lengths
    wanted = build("dgpo", Settings())(batch(lengths=lengths)).advantages
    np.testing.assert_allclose(found["advantage/dgpo"][rows], wanted, atol=1e-12)


def test_groups_are_prompts_whatever_names_them(advantages, tmp_path):
    whole = advantages(made.write(tmp_path / "keys", made.entries()), "dgpo")["advantage/dgpo"]
    plain = [line | {"uid": f"q_{row // 4}_7"} for row, line in enumerate(made.entries())]
    numbers = [line | {"uid": row // 4} for row, line in enumerate(made.entries())]
    texts = made.without(made.entries(), "uid")
    for name, lines in {"plain": plain, "numbers": numbers, "texts": texts}.items():
        found = advantages(made.write(tmp_path / name, lines), "dgpo")
        np.testing.assert_array_equal(found["advantage/dgpo"], whole, err_msg=name)


def test_a_prompt_of_two_steps_forms_two_groups(advantages, tmp_path):
    first, second = made.without(made.entries(1), "uid"), made.without(made.entries(2), "uid")
    found = advantages(made.write(tmp_path / "rollouts", first, second), "drgrpo")
    np.testing.assert_allclose(found["advantage/drgrpo"], np.tile(expected("drgrpo"), 2), atol=1e-12)


def test_the_output_says_where_each_row_comes_from(advantages, tmp_path):
    folder = made.write(tmp_path / "rollouts", made.entries())
    found = advantages(folder, "drgrpo", made.KEYS)
    lines = (folder / "1.jsonl").read_text().splitlines()
    for row, line in enumerate(found["line"]):
        entry = json.loads(lines[line - 1])
        assert found["reward/right"][row] == entry["right"]
        assert found["uid"][row] == entry["uid"].split("_")[0]
