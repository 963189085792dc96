"""What a model, a policy and prompts take of GPUs that need not be there, and how fast they would be."""
