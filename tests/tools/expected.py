"""The advantages that estimators give to the responses of `run_files`."""

from tests.tools.run_files import example_batch
from verl_ext import Settings, build


def advantages_of(name, keys=("score",), **sections):
    """Return the advantages of an estimator; without `keys`, those on the score."""
    if keys != ("score",):
        sections["rewards"] = {"keys": list(keys)}
    chain = build(name, Settings.parse(sections))
    return chain(example_batch(keys)).advantages
