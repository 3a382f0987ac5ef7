"""`scripts/evidence/paper_figures.py`: numbers against closed forms, exact arithmetic, verl, the papers."""

from __future__ import annotations

import doctest
import itertools
from decimal import Decimal, localcontext
from math import comb, exp, sqrt
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "scripts/evidence"))
    import paper_figures
    from figures import common, dgpo, drgrpo, gdpo, hadw

CHANCES = np.array([0.02, 0.1, 0.25, 0.4, 0.5, 0.7, 0.95])


@pytest.mark.parametrize("module", [common, dgpo, drgrpo, gdpo, hadw])
def test_the_examples_in_the_docstrings(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", paper_figures.FIGURES)
def test_the_paragraph_of_the_page_is_fresh(name):
    text = (paper_figures.PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert paper_figures.page(name, text) == text, "run python scripts/evidence/paper_figures.py"
    assert (paper_figures.PICTURES / f"paper_{name}.png").stat().st_size < 120_000


@pytest.mark.parametrize("name", paper_figures.FIGURES)
def test_the_picture_is_drawn(name, tmp_path):
    path = tmp_path / "drawn.png"
    paper_figures.draw(name, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(SystemExit, match="drgrpo"):
        paper_figures.page("drgrpo", "# drgrpo\n")


class TestGdpo:
    @pytest.mark.parametrize("rollouts", gdpo.ROLLOUTS)
    def test_counts_of_grpo_are_those_of_the_closed_form(self, rollouts):
        # The sum of two rewards is 0, 1 or 2. No variance: 1. Two of the values: n - 1 splits, and the std leaves no
        # trace of the distance. All three: C(n - 1, 2) splits. Without the std, distances 1 and 2 differ.
        three = comb(rollouts - 1, 2)
        assert gdpo.distinct("grpo", rollouts, 2) == 1 + (rollouts - 1) + three
        assert gdpo.distinct("grpo without std", rollouts, 2) == 1 + 2 * (rollouts - 1) + three

    @pytest.mark.parametrize(
        "shape", [(2, 2), (3, 2), (5, 2), (8, 2), (11, 2), (16, 2), (2, 4), (4, 3), (4, 4), (4, 6)]
    )
    def test_counts_of_gdpo_are_those_of_exact_arithmetic(self, shape):
        """40 digits and no epsilon, rollout by rollout."""
        rollouts, rewards = shape
        with localcontext() as context:
            context.prec = 40
            # k right answers: the sum of squares about the mean is k (n - k) / n, divided by n - 1
            std = [(Decimal(k * (rollouts - k)) / (rollouts * (rollouts - 1))).sqrt() for k in range(rollouts + 1)]
            value = {
                (reward, k): round((reward - Decimal(k) / rollouts) / std[k], 30) if std[k] else Decimal(0)
                for reward, k in itertools.product((0, 1), range(rollouts + 1))
            }
            found = set()
            for group in gdpo.groups_of(rollouts, rewards).astype(int).tolist():
                right = [sum(column) for column in zip(*group, strict=True)]
                total = [sum(value[pair] for pair in zip(row, right, strict=True)) for row in group]
                found.add(tuple(sorted(round(one, 25) + 0 for one in total)))
        assert gdpo.distinct("gdpo", rollouts, rewards) == len(found)

    def test_both_ways_to_list_the_groups_agree(self):
        by_rollouts = gdpo.groups_of(4, 3)  # 8 kinds of rollouts, 16 of rewards
        listed = list(itertools.combinations_with_replacement(list(itertools.product((0.0, 1.0), repeat=4)), 3))
        by_rewards = np.array(listed).transpose(0, 2, 1)

        def found(groups):
            values = np.sort(common.advantages("gdpo", groups, {"gdpo": {"whiten": "none"}}), axis=1)
            return {tuple(row) for row in (values.round(4) + 0.0).tolist()}

        assert len(by_rollouts) == 330
        assert len(by_rewards) == 816
        assert found(by_rollouts) == found(by_rewards)

    def test_the_two_rollouts_are_those_of_the_paper(self):
        assert gdpo.better("grpo") == pytest.approx((0.7071, 0.7071), abs=1e-4)
        assert gdpo.better("grpo without std") == (0.5, 1.0)
        assert gdpo.better("gdpo") == pytest.approx((0.7071, 1.4142), abs=1e-4)

    @pytest.mark.parametrize(
        ("name", "rewards", "first", "read"),
        [
            ("grpo", 2, 4, (7.2, 11, 16, 22.3, 29, 37.1, 46.1, 56.2, 67, 79.2, 92, 105.9, 120.8)),
            ("gdpo", 2, 2, (2.7, 5.8, 14.2, 26.1, 38, 59.2, 81.4, 108.9, 144.9, 185.1)),
            ("grpo", None, 3, (13.2, 22.8, 41.2, 55.3)),
            ("gdpo", None, 3, (43.9, 127.2, 317.5, 720.2)),
        ],
    )
    def test_the_counts_are_those_of_the_authors_picture(self, name, rewards, first, read):
        """The centres of the markers on https://nvlabs.github.io/GDPO, by rollouts, or by rewards for 4 rollouts."""
        for number, count in enumerate(read, first):
            shape = (4, number) if rewards is None else (number, rewards)
            assert gdpo.distinct(name, *shape) == pytest.approx(count, abs=2)


class TestDgpo:
    p = dgpo.ACCURACY

    def test_sums_of_absolute_advantages_are_the_closed_forms(self):
        size = dgpo.SIZE
        paper = 2 * size * np.sqrt(self.p * (1 - self.p))
        assert dgpo.total("grpo") == pytest.approx(paper * sqrt((size - 1) / size), rel=1e-5)
        assert dgpo.total("drgrpo") == pytest.approx(2 * size * self.p * (1 - self.p), rel=1e-12)
        # the epsilon is added to sum |r - mean| = 2 G p (1 - p)
        spread = 2 * size * self.p * (1 - self.p)
        assert dgpo.unweighted() == pytest.approx(size * spread / (spread + 1e-4), rel=1e-12)

    @pytest.mark.parametrize("temperature", dgpo.TEMPERATURES)
    def test_weights_are_the_softmax_and_add_up_to_the_groups(self, temperature):
        odds = np.exp(-self.p / temperature)
        assert dgpo.weights(temperature) == pytest.approx(7 * odds / odds.sum(), rel=1e-9)
        assert dgpo.weights(temperature)[0] / dgpo.weights(temperature)[-1] == pytest.approx(exp(0.75 / temperature))


class TestHadw:
    @pytest.mark.parametrize("size", [2, *hadw.ROLLOUTS])
    def test_the_bias_is_lemma_2_of_the_paper(self, size):
        p = CHANCES
        lemma = (p * (1 - p) ** size + p ** (size + 1) - p**size) / (1 - (1 - p) ** size - p**size)
        found = hadw.bias(hadw.before(size), p)
        assert found == pytest.approx(-lemma, abs=1e-12)
        if size > 2:
            assert (found[p < 0.5] < 0).all()
            assert (found[p > 0.5] > 0).all()
        assert found[4] == pytest.approx(0, abs=1e-12)

    @pytest.mark.parametrize("answers", ["all", "right", "wrong"])
    @pytest.mark.parametrize("anchor", hadw.ANCHORS)
    @pytest.mark.parametrize("scale", hadw.LAMBDAS)
    def test_the_bias_after_phi_is_the_sum_over_all_outcomes(self, scale, anchor, answers):
        """Every order of right and wrong answers one by one, with the formula written out."""
        size = hadw.SIZE
        found = hadw.bias(hadw.after(size, scale, anchor), CHANCES, answers)
        for p, value in zip(CHANCES, found, strict=True):
            error = weight = 0.0
            for outcome in itertools.product((0, 1), repeat=size):
                right = sum(outcome)
                if not 0 < right < size:
                    continue
                mean, chance = right / size, p**right * (1 - p) ** (size - right)
                for reward in outcome:
                    if answers == "all" or (answers == "right") == bool(reward):
                        sign = 1 if reward else -1
                        advantage = (reward - mean) * scale * exp(sign * (anchor - mean))
                        error += chance * (advantage - (reward - p))
                        weight += chance
            assert value == pytest.approx(error / weight, abs=1e-9)

    def test_the_chances_are_those_of_the_papers_tables(self):
        tables = {  # tables 4, 5 and 6, which leave the ends of the interval out
            (0, 0.25): {2: 0.999997499987, 4: 0.999995948256, 6: 0.827761785622, 8: 0.781129955681},
            (0, 0.5): {2: 0.999994999975, 4: 0.776965795853, 6: 0.689721502158, 8: 0.640944744224},
        }
        for (low, high), table in tables.items():
            for size, chance in table.items():
                assert hadw.underrated(size, low, high) == pytest.approx(chance, abs=6e-6)
        for size, chance in {2: 0.499997499987, 3: 0.749995833315, 5: 0.780787089465, 6: 0.781154327380}.items():
            assert hadw.underrated(size, 0, 2 / size) == pytest.approx(chance, abs=6e-6)

    def test_where_it_helps_and_where_it_overshoots(self):
        """What the paragraph says in words."""
        p = np.linspace(0.001, 0.499, 500)
        old = np.abs(hadw.bias(hadw.before(8), p))
        for scale in hadw.LAMBDAS:
            new = hadw.bias(hadw.after(8, scale, 0.5), p)
            edge = hadw.crossing(scale)
            assert (np.abs(new)[p < edge - 0.001] < old[p < edge - 0.001]).all()
            assert (np.abs(new)[p > edge + 0.001] > old[p > edge + 0.001]).all()
            assert (new[p > edge + 0.001] > 0).all()
            mirrored = hadw.bias(hadw.after(8, scale, 0.5), 1 - p)
            assert mirrored == pytest.approx(-new, abs=1e-12)


class TestDrgrpo:
    LENGTHS = (4, 2, 3, 1)  # two groups and two micro-batches of two

    @pytest.mark.parametrize(
        ("name", "mode", "factor"),
        [
            ("length", "seq-mean-token-mean", None),
            ("batch", "token-mean", None),
            ("constant", "seq-mean-token-sum-norm", 8),
            ("longest", "seq-mean-token-sum-norm", None),
            ("nothing", "seq-mean-token-sum", None),
        ],
    )
    def test_weights_are_the_gradients_of_verls_loss(self, name, mode, factor):
        import torch
        from verl.trainer.ppo.core_algos import agg_loss

        lengths = torch.tensor(self.LENGTHS)
        mask = (torch.arange(4) < lengths[:, None]).float()
        loss = torch.zeros(4, 4, requires_grad=True)
        for rows in ([0, 1], [2, 3]):
            width = int(lengths[rows].max())
            agg_loss(
                loss[rows, :width],
                mask[rows, :width],
                mode,
                batch_num_tokens=int(mask.sum()),
                global_batch_size=4,
                loss_scale_factor=factor,
            ).backward()
        expected = drgrpo.token_weights(self.LENGTHS, groups=2, micro_batches=2, limit=8)[name]
        assert loss.grad.numpy() == pytest.approx((mask * torch.tensor(expected)[:, None]).numpy(), abs=1e-7)

    def test_the_normalisers_that_verl_lacks_by_hand(self):
        # groups of two, tokens 4 + 2 and 3 + 1, then the mean over both: 1/12 and 1/8; micro-batch: all four, 1/10
        found = drgrpo.token_weights(self.LENGTHS, groups=2, micro_batches=1, limit=8)
        assert found["group"] == pytest.approx([1 / 12, 1 / 12, 1 / 8, 1 / 8])
        assert found["micro"] == pytest.approx([1 / 10] * 4)

    def test_the_weight_of_one_response_of_another_length_by_hand(self):
        # 64 responses of 500 tokens, one of them now of 2000; micro-batches of 4, groups of 8
        expected = {
            "length": 500 / 2000,
            "longest": 500 / 2000,
            "micro": 2000 / 3500,
            "group": 4000 / 5500,
            "batch": 32000 / 33500,
            "constant": 1,
            "nothing": 1,
        }
        for name, weight in expected.items():
            assert drgrpo.by_length(name)[drgrpo.LENGTHS.index(2000)] == pytest.approx(weight), name

    def test_advantages_by_accuracy_are_the_closed_forms(self):
        p = drgrpo.ACCURACY
        std = np.sqrt(8 / 7 * p * (1 - p))
        for estimator, divisor in (("grpo", std), ("drgrpo", 1)):
            right, wrong = drgrpo.by_accuracy(estimator)
            assert right == pytest.approx((1 - p) / divisor, rel=1e-5)
            assert wrong == pytest.approx(p / divisor, rel=1e-5)
