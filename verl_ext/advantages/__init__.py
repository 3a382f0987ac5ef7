"""What brings rewards into the core and advantages out of it, on verl's default trainer and on `RayPPOTrainer`."""
