"""Random batches for the trainers: uneven groups, padding, sessions of several outputs, missing rewards, rubrics."""

import numpy as np
import torch
from hypothesis import strategies as st

from tests.integration.trainers.trainer_batches import PADDING, WIDTH, TrainerBatch
from verl_ext import rubric


@st.composite
def random_batches(draw: st.DrawFn, *, sessions: bool) -> TrainerBatch:
    """Draw a seed for `random_batch`."""
    seed = draw(st.integers(0, 2**32 - 1))
    return random_batch(np.random.default_rng(seed), sessions=sessions)


def random_batch(rng: np.random.Generator, *, sessions: bool) -> TrainerBatch:
    """Return a batch of up to four prompts with uneven groups and rows of padding, in random order.

    With `sessions`, some sessions have several outputs.
    """
    rows = random_rows(rng, sessions=sessions)
    prompt, session, output = rows.T
    size = len(rows)
    length = rng.integers(1, WIDTH + 1, size)
    mask = random_mask(rng, length)
    mask[prompt == PADDING] = False
    missing_probability = rng.choice([0.0, 0.0, 0.2])
    score = random_numbers(rng, size)
    kl = rng.integers(-64, 65, size) / 64
    columns = {}
    for key in ("a", "b"):
        is_missing = rng.random(size) < missing_probability
        columns[key] = np.where(is_missing, np.nan, random_numbers(rng, size))
    columns["acc"] = rng.integers(0, 5, size) / 4
    columns["rubric"] = random_rubrics(rng, prompt)
    return TrainerBatch(
        prompt=prompt.tolist(),
        session=session.tolist(),
        output=output.tolist(),
        length=length,
        mask=torch.from_numpy(mask.astype(np.int64)),
        score=score,
        kl=kl,
        kl_tokens=mask.sum(axis=1),
        columns=columns,
        process=random_numbers(rng, size),
        source=rng.choice(["letters", "digits"], size).tolist(),
    )


def random_rows(rng: np.random.Generator, *, sessions: bool) -> np.ndarray:
    """Return the prompt, session and output of each row, `[rows, 3]`, in random order."""
    rows = []
    for prompt in range(rng.integers(1, 5)):
        for session in range(rng.integers(1, 6)):
            outputs = rng.integers(1, 4) if sessions and rng.random() < 0.3 else 1
            rows += [(prompt, session, output) for output in range(outputs)]
    rows += [(PADDING, number, 0) for number in range(rng.integers(3))]
    return rng.permutation(np.array(rows))


def random_mask(rng: np.random.Generator, length: np.ndarray) -> np.ndarray:
    """Return which tokens are trained on, `[rows, tokens]`: in some rows all tokens, in others about 30%."""
    size = len(length)
    is_response = np.arange(WIDTH) < length[:, None]
    random = rng.random((size, WIDTH))
    probability_of_row = rng.choice([0.3, 1.0], (size, 1))
    return is_response & (random < probability_of_row)


def random_numbers(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return either a few usual rewards or multiples of 1/64, whose sums are exact in float32."""
    usual = rng.choice([0.0, 1.0, -1.0, 0.5], size)
    if rng.random() < 0.5:
        return usual
    return rng.integers(-640, 641, size) / 64


def random_rubrics(rng: np.random.Generator, prompts: np.ndarray) -> np.ndarray:
    """Return the text of each row's rubric. Each prompt has up to five criteria, which may be unscored."""
    weights_by_prompt = {}
    for prompt in [PADDING, *range(4)]:
        criteria = rng.integers(1, 6)
        weights_by_prompt[prompt] = rng.choice([-2.0, 1.0, 3.0], criteria)
    texts = []
    for prompt in prompts.tolist():
        weights = weights_by_prompt[prompt]
        values = rng.choice([0.0, 1.0, np.nan], len(weights))
        texts.append(rubric(values, weights))
    return np.array(texts, dtype=object)
