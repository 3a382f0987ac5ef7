"""All that touches verl. Nothing outside this folder and `verl_ext.cpu` imports verl."""
