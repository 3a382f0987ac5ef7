"""Convert a published data set to verl's parquet files: shared by the `prepare_data.py` of the recipes.

A recipe defines a `Plan`: where the data set is, the files and columns of each split, and a function from a record to a
row. `verl_ext.recipes.data.command.main(plan)` is the command line. Every row is checked, including its ground truth by
the scorer. A bad row is reported with its index and the reason, and skipped only with `--skip_bad_rows`.
"""

from verl_ext.recipes.data.plan import Plan, Record, Row, Split, row

__all__ = ["Plan", "Record", "Row", "Split", "row"]
