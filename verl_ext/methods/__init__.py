"""The estimators that are no rows, one file each; `verl_ext.registry` lists them."""
