"""What verl_ext adds to verl's trainers, the default trainer and `RayPPOTrainer`."""
