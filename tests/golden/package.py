"""The estimators called directly and through verl's registry: the only place here that knows the package's names."""

from __future__ import annotations

import numpy as np

from tests.calls import call_on_tensors
from tests.golden.cases import Case, Outcome, Rows, per_row
from verl_ext import Batch, Settings, build
from verl_ext.integration.run import Run


def direct(case: Case) -> list[Outcome]:
    """`build(name, settings)(batch, state)`, one entry a trajectory."""
    chain, state, found = build(case.estimator, Settings.parse(case.algorithm, loss_agg_mode=case.loss)), None, []
    for rows in case.batches:
        if not rows.sessions:  # padding only: the trainers do not call the chain
            found.append(Outcome(np.zeros(0)))
            continue
        result = chain(batch_of(case, rows), state)
        state = result.state
        metrics = {f"{case.estimator}/{name}": value for name, value in result.metrics.items()}
        found.append(Outcome(result.advantages, metrics))
    return found


def batch_of(case: Case, rows: Rows) -> Batch:
    """The trajectories: the last output of each session carries its rewards, the tokens of all outputs count."""
    scored = np.array([session[-1] for session in rows.sessions])
    tokens = rows.mask.sum(dim=1).numpy()
    columns = {**rows.columns, "score": rows.total_score}
    accuracy = None
    if case.accuracy is not None:
        key, threshold = case.accuracy
        accuracy = columns[key][scored]
        if threshold is not None:
            margin = 1e-6 * max(1.0, abs(threshold))
            accuracy = np.where(np.isnan(accuracy), np.nan, accuracy > threshold + margin)
    kl = -rows.kl / 1024 * tokens
    return Batch.of(
        np.stack([columns[key][scored] for key in case.keys or ("score",)], axis=1),
        [int(prompt) for prompt in rows.prompt[scored]],
        keys=case.keys or ("score",),
        lengths=[float(sum(tokens[session])) for session in rows.sessions],
        accuracy=accuracy,
        kl_reward=kl[scored] if case.algorithm.get("use_kl_in_reward") else None,
    )


def registry(case: Case) -> list[Outcome]:
    """The function in verl's registry on verl's tensors; every row that is no padding is a trajectory."""
    settings = Settings.parse(case.algorithm, loss_agg_mode=case.loss)
    run = Run(case.estimator, settings, build(case.estimator, settings))
    found = []
    for rows in case.batches:
        tensors = {"token_level_scores": rows.scores, **case.token_fields(rows)}
        given = {"components": case.infos(rows), "batch": tensors, "run": run}
        one = call_on_tensors(case.estimator, rows.rewards, rows.mask, rows.uids, **given)
        assert one.returns is one.tensor
        found.append(Outcome(per_row(one.tensor, rows.mask)))
    return found
