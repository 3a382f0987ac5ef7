"""The figures of `scripts/evidence/paper_figures.py`, one file for each estimator.

A file has functions that return numbers, `key_numbers`, the few that stand on the page, `paragraph`, the text of the
page with these numbers, `draw`, and ALT, the picture in words.
"""
