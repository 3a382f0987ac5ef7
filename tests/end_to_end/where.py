"""A reward function that says where it runs, and whether the package is registered there."""

from __future__ import annotations

import socket

from tests.integration.stand_ins import registered_here


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    letters = solution_str.count("a") / max(1, len(solution_str))
    return {
        "score": letters,
        "letters": letters,
        "elsewhere": float(socket.gethostname() != "a"),
        "registered": float(len(registered_here())),
    }
