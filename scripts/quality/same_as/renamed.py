"""The names that differ between versions of the package, and the differences between versions that are intended.

Each entry of the tables of spellings is one name in all its spellings, **the newest first**. A case may be written in
any of them. A version is asked which spelling it accepts (`spelling.py`), so no entry says for which versions it holds.
Results are compared under the newest spelling. To follow a renaming, put the new name before the old one:

    SETTINGS = (("dara.variant", "dara.of"), ...)
    VALUES = (("dara.variant", ("symmetric", "both")), ...)
    METRICS = (("advantage/contribution/*", "advantage/share/*"), ...)

A `*` stands for any text without `/` or `.`, such as the name of a reward.
"""

# Settings below `algorithm`. Settings of steps in a list begin with `steps.<name of the step>.`
SETTINGS: tuple[tuple[str, ...], ...] = (("gd2po.over", "gd2po.whiten"),)
# Values of a setting: the newest path of the setting, then the spellings of one value.
VALUES: tuple[tuple[str, tuple[object, ...]], ...] = ()
# Named methods, the values of `algorithm.adv_estimator` and `algorithm.hadw.base`.
METHODS: tuple[tuple[str, ...], ...] = ()
# Steps, by the names that lists and saved states use.
STEPS: tuple[tuple[str, ...], ...] = ()
# Metrics, with `*` for the name of a reward or a method.
METRICS: tuple[tuple[str, ...], ...] = ()
# Columns of dumps.
COLUMNS: tuple[tuple[str, ...], ...] = ()
# Entries of saved states, wherever they stand in the JSON.
STATE: tuple[tuple[str, ...], ...] = ()
# Types of errors.
ERRORS: tuple[tuple[str, ...], ...] = ()
# Functions and arguments of the public API that the cases use: `by_turn`, and the parameters of `Batch.of`.
FUNCTIONS: tuple[tuple[str, ...], ...] = (
    ("per_turn", "by_turn"),
    ("rubric", "by_item"),
)
PARAMETERS: tuple[tuple[str, ...], ...] = ()

# Estimators that are verl's own in every version.
OF_VERL_ALONE = frozenset(
    {
        *("grpo", "rloo", "rloo_vectorized", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg"),
        *("grpo_vectorized", "grpo_passk", ""),
    }
)
# Metrics and columns that an older version may lack. One that the newer version lacks is always a difference.
ADDED_METRICS: tuple[str, ...] = ("advantage/share/*",)
ADDED_COLUMNS: tuple[str, ...] = ()
# Differences that are intended: a kind, or `kind/method`; then a pattern of what differs; then the reason.
EXPECTED: tuple[tuple[str, str, str], ...] = ()
