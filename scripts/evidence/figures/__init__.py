"""The figures of `scripts/evidence/paper_figures.py`: a file for each estimator, with its paragraph and picture."""
