"""What a model, a policy and prompts take on GPUs that need not be there: memory by arithmetic, and estimates of time."""
