"""Pure mathematics: rewards of trajectories in, advantages out. numpy and torch only, but for your own steps.

Letters in shapes: `N` trajectories, `K` reward components, `G` prompt groups, `B` rows, `L` response tokens.
"""
