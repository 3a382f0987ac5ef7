"""`verl-ext compare`: the advantages that estimators would have given to rollouts that a run has written."""
