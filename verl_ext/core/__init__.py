"""Pure computation from rewards of trajectories to advantages. It depends on numpy and torch only.

Letters in shapes: `N` trajectories, `K` reward components, `G` prompt groups, `B` rows, `L` response tokens.
"""
