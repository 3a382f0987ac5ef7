"""Pure computation from rewards of trajectories to advantages. It depends on numpy and torch only.

A response is everything that the model generates for one sample of a prompt. A session with several calls of the model,
or a trajectory with several turns, is one response. Letters in shapes:

- `N` rows of a `Batch`: responses, or with per-turn rewards the turns of responses
- `K` columns: rewards, with one column per criterion of a rubric
- `G` groups of rows that are compared with each other
- `B` rows of verl's batch, `L` response tokens of such a row
- `M` turns, `S` token spans, `C` criteria of a rubric
"""
