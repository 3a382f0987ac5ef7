"""A reward function with a criterion for each letter that the prompt asks for."""

from verl_ext import rubric


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the fraction of each wanted letter in the response as a rubric.

    Later letters have a larger weight. The last letter has a negative weight.
    """
    length = len(solution_str)
    fractions = [solution_str.count(letter) / max(1, length) for letter in ground_truth]
    weights = [*range(1, len(fractions)), -1]
    return {"score": sum(fractions), "length": float(length), "rubric": rubric(fractions, weights=weights)}
