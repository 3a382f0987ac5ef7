"""Tables and pictures from verl's own logs: `python -m verl_ext report RUN...`."""
