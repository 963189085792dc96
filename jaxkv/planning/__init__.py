"""What a model, a policy and prompts take on GPUs that need not be there: memory, and estimates of time."""
