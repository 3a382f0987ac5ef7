"""All that touches verl. Only this folder and `verl_ext.cpu` import verl."""
