"""For `VERL_USE_EXTERNAL_MODULES`: an update takes its rows in the order of their tokens.

verl takes them in the order in which they were done, so that each run has other mini-batches.
"""

from __future__ import annotations

from verl_ext.integration.hooks import after_import, wrap


def install(tensordict_utils):
    wrap(tensordict_utils, "make_iterator", sort_rows)


def sort_rows(original, tensordict, *args, **kwargs):
    from verl.utils.tensordict_utils import index_select_tensor_dict

    rows = [row.tolist() for row in tensordict["input_ids"].unbind()]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return original(index_select_tensor_dict(tensordict, order), *args, **kwargs)


after_import("verl.utils.tensordict_utils", install)
