"""Summarise a validation run of verl: the mean of every reward, and pass@k.

    python -m verl_ext.recipes.evaluation FOLDER --right correctness

reads the dumps that verl writes to `trainer.validation_data_dir`.
"""
