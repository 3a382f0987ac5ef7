"""`verl-ext compare`: the advantages that estimators would have given to the rollouts of a run."""
