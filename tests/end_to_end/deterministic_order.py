"""Let two runs with one seed have the same responses and the same rows in each mini-batch.

A run imports this module by `VERL_USE_EXTERNAL_MODULES`. verl takes the rows of an update in the order in which their
generation ended. This module sorts the rows by their tokens. verl asks any free rollout server, and each server has its
own random generator. With this module, the first server generates every response.
"""

from verl_ext.hooks import after_import, wrap


def sort_rows(original, tensordict, *args, **kwargs):
    from verl.utils.tensordict_utils import index_select_tensor_dict

    rows = [row.tolist() for row in tensordict["input_ids"].unbind()]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return original(index_select_tensor_dict(tensordict, order), *args, **kwargs)


def first_server(original, self, request_id):
    first = min(self._servers)
    self._inflight_requests[first] += 1
    return first, self._servers[first]


after_import("verl.utils.tensordict_utils", lambda module: wrap(module, "make_iterator", sort_rows))
for name in ("llm_server", "router"):  # verl 0.9.0, verl 0.9.1
    after_import(
        f"verl.workers.rollout.{name}",
        lambda module: wrap(module.GlobalRequestLoadBalancer, "acquire_server", first_server),
    )
