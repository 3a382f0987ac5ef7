"""Pure computation from rewards to advantages. It depends on numpy and torch only.

Three words have one meaning each:

- A **trajectory** is one sample of a prompt: everything that the model generates for it, in one or several turns.
  Messages, settings and the descriptions of steps call a trajectory a response, as the papers do.
- A **segment** is what gets one advantage: a whole trajectory, or with per-turn rewards one turn of a trajectory.
- A **row** is a row of verl's batch, one output of the model. A trajectory has several rows if an agent loop continued
  the session with several calls of the model. The rows of padding belong to no trajectory.

Letters in shapes:

- `N` segments of a `Batch`
- `K` columns of a `Batch`: rewards, with one column per criterion of a rubric
- `G` groups of segments that are compared with each other
- `T` trajectories
- `B` rows of verl's batch, `L` response tokens of such a row
- `S` token spans, `C` criteria of a rubric

In the formula of a method, a letter has the meaning that its docstring gives.
"""
