"""The pages that `make_docs.py` writes, one module each. The function `blocks` yields the blocks of a page in order."""
