"""Read the rewards of a batch of verl's `RayPPOTrainer`, a `DataProto` whose rows are responses and padding."""

from typing import Any

from verl_ext.advantages.table import TOKEN_FIELD, Request, Table
from verl_ext.core.groups import Groups
from verl_ext.core.row_index import RowIndex, TurnSpans, row_sums, scores

UID = "uid"
MASK = "response_mask"
ATTENTION = "attention_mask"
TRAINER_SCORE = "token_level_scores"


def read_table(data: Any, request: Request) -> Table:
    """Read what a run needs of a batch. `data.batch` has the tensors, `data.non_tensor_batch` the other fields.

    The trainer names what the reward function returned in `data.meta_info["reward_extra_keys"]`. A tensor may be read
    from another process, so only those that the run needs are read.
    """
    fields = data.non_tensor_batch
    mask = data.batch[MASK]
    uids = fields[UID].tolist()
    groups_of_rows = Groups.of(uids)
    rows = RowIndex.of_groups(groups_of_rows, mask)
    if rows.one_to_one:
        table = Table(settings=request.settings, row_index=rows, labels=uids, groups=groups_of_rows, fields=fields)
    else:  # drop the rows of padding
        fields_of_trajectories = {name: rows.labels(values) for name, values in fields.items()}
        table = Table(
            settings=request.settings, row_index=rows, labels=rows.labels(uids), fields=fields_of_trajectories
        )
    returned_names = data.meta_info.get("reward_extra_keys")
    if returned_names is None:
        table.results = None
    else:
        table.results = {name: table.fields[name] for name in returned_names if name in table.fields}

    present = set(data.batch.keys())
    token_scores = {}
    for name in request.names:
        token_field = TOKEN_FIELD + name
        if token_field in present:
            token_scores[name] = rows.gather(scores(data.batch[token_field], mask))
    table.token_scores = token_scores
    if request.score and TRAINER_SCORE in present:
        table.score = rows.gather(scores(data.batch[TRAINER_SCORE], mask))
    if request.turns:
        table.spans = TurnSpans.of(mask, rows)
        if ATTENTION in present:
            width = mask.shape[1]
            attention_of_response = data.batch[ATTENTION][:, -width:]
            tokens = rows.gather(row_sums(attention_of_response.float()))
            table.truncated = tokens >= (request.max_response_length or width)
    return table
