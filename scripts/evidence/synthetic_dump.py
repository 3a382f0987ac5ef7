"""Write a dump of advantages of synthetic rollouts, for the examples of docs/pages/compare.md: no model is trained.

    python scripts/evidence/synthetic_dump.py outputs/synthetic
    python -m verl_ext compare outputs/synthetic gdpo dgpo hadw --plot docs/pages/pictures/compare.png

30 steps of 16 prompts with 8 answers. Correctness is -3 or 3. A prompt's chance of 3 is drawn from Beta(0.5, 0.9) and
rises with the steps. Format is 0 or 1. Its chance of 1 rises from 0.5 to 0.95; in early steps it is 0.2 less for right
answers. The run is one of verl's grpo on the sum of both rewards, as if it had named and dumped them.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.estimators.grpo import grpo
from verl_ext.integration import dump
from verl_ext.integration.run import Run
from verl_ext.settings import Settings

STEPS, PROMPTS, ANSWERS = 30, 16, 8
KEYS = ("correctness", "format")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="algorithm.verl_ext.dump_dir")
    rewards = {"keys": list(KEYS), "accuracy_key": "correctness", "accuracy_threshold": 0.0}
    settings = Settings.parse({"rewards": rewards, "verl_ext": {"dump_dir": parser.parse_args().folder}})
    rng = np.random.default_rng(0)
    run, chain = Run("grpo", settings, trainer=SimpleNamespace()), grpo(Settings())
    for step in range(1, STEPS + 1):
        run.trainer.global_steps = step
        learnt = step / STEPS
        chance = np.repeat(rng.beta(0.5, 0.9, PROMPTS), ANSWERS)
        chance += 0.3 * learnt * (1 - chance)
        right = rng.random(len(chance)) < chance
        formed = rng.random(len(chance)) < 0.5 + 0.45 * learnt - 0.2 * right * (1 - learnt)
        uids = [f"prompt-{step}-{row // ANSWERS}" for row in range(len(chance))]
        lengths = rng.integers(20, 160, len(chance))
        values = np.stack([6.0 * right - 3, formed], axis=1)
        score = values.sum(axis=1)
        batch = Batch.of(values, uids, keys=KEYS, lengths=lengths)
        advantages = chain(Batch.of(score[:, None], uids)).advantages
        dump.write(run, batch, advantages, total=score)


if __name__ == "__main__":
    main()
