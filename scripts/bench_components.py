"""Time what named rewards cost in the default (V1) trainer, which fetches them from TransferQueue.

A real Ray and a real TransferQueue hold rows as verl's agent loop writes them. The script compares the fetch of verl's
own `_compute_advantage` with our additional fetch, for a run that reads two components and for a run that reads only
the score (which fetches nothing). Medians of alternating rounds, in milliseconds.

    python scripts/bench_components.py --rows 1024 8192
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import numpy as np
import ray
import torch
from hydra import compose, initialize_config_module
from transfer_queue import KVBatchMeta

LENGTH = 1024
THEIRS = ["uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs"]


def fill(queue, rows: int) -> KVBatchMeta:
    """Write rows, 8 per prompt, of at most `LENGTH` tokens, with the outputs of a reward function and a tool call."""
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    draw = np.random.default_rng(0)
    keys, tags, fields = [], [], []
    for row in range(rows):
        length = int(draw.integers(LENGTH // 8, LENGTH + 1))
        uid = f"{row // 8:032x}"
        keys.append(f"{uid}_{row % 8}_0")
        tags.append({"status": "success", "seq_len": length})
        ones = torch.ones(length)
        info = {"score": 1.5, "correctness": float(draw.integers(0, 2)), "format": 0.5, "acc": 1.0}
        extra = {"reward_extra_info": info, "raw_prompt": [{"role": "user", "content": "x" * 200}], "turn_scores": []}
        fields.append(
            {"uid": uid, "response_mask": ones.long(), "extra_fields": extra}
            | dict.fromkeys(("rm_scores", "rollout_log_probs", "old_log_probs"), ones)
        )
    for start in range(0, rows, 1024):
        part = slice(start, start + 1024)
        queue.kv_batch_put(
            keys=keys[part], tags=tags[part], fields=list_of_dict_to_tensordict(fields[part]), partition_id="train"
        )
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    import transfer_queue as queue
    import verl  # noqa: F401 - loads the plugin

    from verl_ext.core.rows import Rows
    from verl_ext.integration.trainers.attach import TrainerRun
    from verl_ext.integration.trainers.rollout_data import fetch_components
    from verl_ext.settings import Settings

    two = TrainerRun("gdpo", Settings.parse({"rewards": {"keys": ["correctness", "format"]}}))
    none = TrainerRun("drgrpo", Settings())
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer").transfer_queue
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        ray.init(num_cpus=16, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        try:
            config.enable = True
            queue.init(config)
            print("| rows | verl's own fetch | two components | the score alone |\n|---|---|---|---|")
            for count in options.rows:
                batch = fill(queue, count)
                rows = Rows.of_sessions(batch.keys, np.zeros(count, dtype=bool))

                def theirs(batch=batch):
                    queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=THEIRS)

                def ours(run, batch=batch, rows=rows):
                    found = fetch_components(batch, rows, run)
                    for key in run.settings.rewards.keys or ():
                        found.column(key, "")

                times = {"theirs": [], "two": [], "none": []}
                for _ in range(options.rounds):
                    for name, function in (
                        ("theirs", theirs),
                        ("two", lambda: ours(two)),
                        ("none", lambda: ours(none)),
                    ):
                        began = time.perf_counter()
                        function()
                        times[name].append(time.perf_counter() - began)
                cells = " | ".join(f"{statistics.median(values) * 1e3:.1f}" for values in times.values())
                print(f"| {count} | {cells} |", flush=True)
                queue.kv_clear(keys=batch.keys, partition_id="train")
            queue.close()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
