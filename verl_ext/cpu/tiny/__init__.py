"""Tiny tasks for machines without an accelerator: a tokenizer, a model of some 100 thousand parameters, and data.

| task | rewards |
|---|---|
| `tools` | `verl_ext.rewards.tool_calling`: `correctness` from -3 to 3, `format` 0 or 1 |
| `sums` | `verl_ext.rewards.gsm8k`: `correctness`, `integer`, `format`, 0 or 1 each |

The model is first trained with supervision on answers of which a known share is wrong, so that reinforcement learning
starts from partial success in every reward. `scripts/make_tiny_task.py` writes a task's folder, `scripts/train_tiny.py`
trains on it with verl.
"""
