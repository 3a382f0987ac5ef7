"""What a validation run of verl found, answer by answer: means of every reward, and pass@k.

    python -m verl_ext.recipes.evaluation FOLDER --right correctness

reads what `trainer.validation_data_dir` made verl write.
"""
