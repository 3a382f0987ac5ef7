"""Tables and plots of the metrics that verl logs: `python -m verl_ext report RUN...`."""
