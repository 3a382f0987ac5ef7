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
SETTINGS: tuple[tuple[str, ...], ...] = (
    ("dara.variant", "dara.of"),
    ("dara.whiten", "dara.over"),
    ("gd2po.whiten", "gd2po.over"),
    ("rewards.per_turn", "rewards.by_turn"),
    ("rewards.rubrics", "rewards.by_item"),
    ("rewards.conditions.*.reward", "rewards.conditions.*.on"),
    ("saw.min_values", "saw.lowest"),
    ("steps.weight_by_density.variant", "steps.weight_by_density.of"),
    ("steps.weight_by_variation.min_values", "steps.weigh_by_variation.lowest"),
)
# Values of a setting: the newest path of the setting, then the spellings of one value.
VALUES: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("dara.variant", ("symmetric", "both")),
    ("rewards.rejected", ("exclude", "leave_out")),
    ("steps.weight_by_density.variant", ("symmetric", "both")),
)
# Named methods, the values of `algorithm.adv_estimator` and `algorithm.hadw.base`.
METHODS: tuple[tuple[str, ...], ...] = ()
# Steps, by the names that lists and saved states use.
STEPS: tuple[tuple[str, ...], ...] = (
    ("center", "centre"),
    ("length_penalty", "shorten"),
    ("weighted_sum", "weigh_and_sum"),
    ("weight_by_density", "weigh_by_density"),
    ("weight_by_difficulty", "weigh_by_difficulty"),
    ("weight_by_focal", "weigh_by_focal"),
    ("weight_by_history", "weigh_by_history"),
    ("weight_by_variation", "weigh_by_variation"),
)
# Metrics, with `*` for the name of a reward or a method.
METRICS: tuple[tuple[str, ...], ...] = (
    ("advantage/contribution/*", "advantage/share/*"),
    ("advantage/single_turn_fraction", "advantage/single_turns"),
    ("advantage/zero_fraction", "advantage/zero_share"),
    ("reward/*/condition_met_fraction", "reward/*/condition_met"),
    ("reward/*/criteria", "reward/*/items"),
    ("reward/*/per_turn/*/mean", "reward/*/by_turn/*/mean"),
    ("reward/*/truncated_entries", "reward/*/cut_entries"),
    ("reward/*/varying_criteria_fraction", "reward/*/varying_items"),
    ("reward/*/zero_variance_group_fraction", "reward/*/dead_groups"),
    ("*/all_correct_groups", "*/all_right_groups"),
    ("*/all_incorrect_groups", "*/all_wrong_groups"),
    ("*/conflict_fraction", "*/conflict_share"),
    ("*/dropped_fraction", "*/dropped_share"),
    ("*/updates", "*/tick"),
    ("*/zero_variance_fraction", "*/dead_share"),
    ("filter_groups/kept_with_zero_variance_score_total", "filter_groups/kept_with_constant_score_total"),
    ("filter_groups/*_zero_variance_total", "filter_groups/*_constant_total"),
    ("actor/prompts_recomputed", "actor/prompts_cut"),
)
# Columns of dumps.
COLUMNS: tuple[tuple[str, ...], ...] = ()
# Entries of saved states, wherever they stand in the JSON.
STATE: tuple[tuple[str, ...], ...] = (("updates", "ticks"),)
# Types of errors.
ERRORS: tuple[tuple[str, ...], ...] = ()
# Functions and arguments of the public API that the cases use: `by_turn`, and the parameters of `Batch.of`.
FUNCTIONS: tuple[tuple[str, ...], ...] = (
    ("per_turn", "by_turn"),
    ("rubric", "by_item"),
)
PARAMETERS: tuple[tuple[str, ...], ...] = ()
# Options of the command line.
OPTIONS: tuple[tuple[str, str], ...] = (
    ("--answer-template", "--answer-form"),
    ("--responses", "--answers"),
)

# Estimators that are verl's own in every version.
OF_VERL_ALONE = frozenset(
    {
        *("grpo", "rloo", "rloo_vectorized", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg"),
        *("grpo_vectorized", "grpo_passk", ""),
    }
)
# Metrics and columns that an older version may lack. One that the newer version lacks is always a difference.
ADDED_METRICS: tuple[str, ...] = ("advantage/contribution/*",)
ADDED_COLUMNS: tuple[str, ...] = ()
# Differences that are intended: `*`, a kind, or `kind/method`; then a pattern of what differs; then the reason.
RECORDED = "a checkpoint records the estimator, the keys and the weights that saved it"
COMPLETE = "a checkpoint without `data.pt` is incomplete, whether the save overwrote another one or not"
SHARED = "mini-batches that the data-parallel ranks cannot share are an error"
NOT_REGISTERED = "an estimator that is not registered is a warning, whatever the order of its letters is"
MEASURED = "`build` no longer rejects a list whose steps cancel each other: it is measured when a run starts"
NO_DIVISOR = "`gdpo.epsilon` is an error if no divisor of the estimator uses it"
LAST_BITS = "the weighted sum of the rewards is added in another order, so that an exact 0 may differ in the last bits"
EXPECTED: tuple[tuple[str, str, str], ...] = (
    ("check/6 GPUs with batches for 8", "of batch 1", SHARED),
    ("check/6 GPUs with batches for 8 on the other trainer", "of batch 1", SHARED),
    ("check/a misspelt estimator", "of batch 1", NOT_REGISTERED),
    ("lists/compose", "error: the old version ConfigurationError in batch 1: algorithm.compose.steps[", MEASURED),
    ("lists/compose", "occurs twice. Remove one of the two", "a built-in step occurs once on each side of the sum"),
    ("*", "[0].keys: only in the new version", RECORDED),
    ("*", "[0].weights: only in the new version", RECORDED),
    ("*", "[0].overwrites: only in the old version", COMPLETE),
    ("*", "algorithm.gdpo.epsilon=", NO_DIVISOR),
    ("core/dvao", "advantages of batch 3[0][1]: 0 | -1.3877788e-17", LAST_BITS),
    ("default/dvao", "advantage/mean of batch 2: 0.0 | -5.551115123125783e-17", LAST_BITS),
    ("ray/dvao", "advantage/mean of batch 1: 0.0 | -4.163336342344337e-17", LAST_BITS),
    ("ray/compose", "advantage/mean of batch 2: -1.850371707708594e-17 | 0.0", LAST_BITS),
    ("ray/gdpo", "advantage/mean of batch 1: 3.172065784643304e-17 | 0.0", LAST_BITS),
    ("ray/corrgrpo", "advantage/mean of batch 2: 2.7755575615628914e-17 | 0.0", LAST_BITS),
)
