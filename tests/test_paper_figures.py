"""`scripts/evidence/paper_figures.py`: numbers against closed forms, exact arithmetic, the papers."""

from __future__ import annotations

import doctest
import itertools
from collections import Counter
from math import factorial, sqrt
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "scripts/evidence"))
    import paper_figures
    from figures import common, dgpo, gdpo, hadw

CHANCES = np.array([0.02, 0.1, 0.25, 0.4, 0.5, 0.7, 0.95])


@pytest.mark.parametrize("module", [common, dgpo, gdpo, hadw])
def test_the_examples_in_the_docstrings(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", paper_figures.FIGURES)
def test_the_paragraph_of_the_page_is_fresh(name):
    text = (paper_figures.PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert paper_figures.page(name, text) == text, "run python scripts/evidence/paper_figures.py"
    assert (paper_figures.PICTURES / f"paper_{name}.png").stat().st_size < 120_000


class TestGdpo:
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

    @pytest.mark.parametrize(("name", "separately"), [("grpo", False), ("gdpo", True)])
    def test_what_a_hack_earns_is_the_sum_over_all_other_answers(self, name, separately):
        kinds = {(3, 1): 0.25 * 0.6, (3, 0): 0.25 * 0.4, (-3, 1): 0.75 * 0.6, (-3, 0): 0.75 * 0.4}
        expected = 0.0
        for others in itertools.combinations_with_replacement(kinds, 7):
            group = np.array([(-3, 1), *others], dtype=float)
            columns = group.T if separately else group.sum(axis=1)[None]
            parts = [(x[0] - x.mean()) / x.std(ddof=1) for x in columns if np.ptp(x)]
            ways = factorial(7) / np.prod([factorial(n) for n in Counter(others).values()])
            expected += ways * np.prod([kinds[kind] for kind in others]) * sum(parts)
        assert gdpo.hacked(name, np.array([0.25])) == pytest.approx(expected, abs=1e-5)


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
