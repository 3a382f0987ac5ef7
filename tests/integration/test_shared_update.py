"""The update that computes each prompt once (`scripts/evidence/shared_update.py`) has the gradient of verl's."""

from __future__ import annotations

from tests.integration import updates


def test_gradient_and_metrics_are_those_of_verl(folder):
    [found] = updates.run("shared", 1, folder, timeout=300)
    wanted = found.pop("all")
    for other in found.values():
        error = (other["gradients"] - wanted["gradients"]).norm() / wanted["gradients"].norm()
        assert error < 1e-5
        for name in ("actor/pg_loss", "actor/entropy_loss"):
            assert abs(other["metrics"][name][0] / wanted["metrics"][name][0] - 1) < 1e-5
