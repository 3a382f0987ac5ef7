"""A reward with a criterion for each letter that the prompt asks for."""

from verl_ext import rubric


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of each wanted letter in the answer; later letters weigh more, and the last counts against it."""
    shares = [solution_str.count(letter) / max(1, len(solution_str)) for letter in ground_truth]
    weights = [*range(1, len(shares)), -1]
    return {"score": sum(shares), "length": float(len(solution_str)), "rubric": rubric(shares, weights=weights)}
