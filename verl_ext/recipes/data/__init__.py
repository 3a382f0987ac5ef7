"""From a data set as it is published to verl's parquet files: what the recipes' `prepare_data.py` share.

A recipe gives a `Plan`: where the data set is, which files and columns make a split, and a function from one record to
one row. `verl_ext.recipes.data.command.main(plan)` is the command line. Every row is checked, with the scorer's own
check of its ground truth; a bad one is reported with its index and the reason, and never left out unless asked for.
"""

from verl_ext.recipes.data.plan import Plan, Record, Row, Split, row

__all__ = ["Plan", "Record", "Row", "Split", "row"]
