"""The parts of make_real_task.py: the model, the data, and the cold start."""
