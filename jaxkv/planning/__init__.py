"""Plans memory and estimates time of a model, a policy and prompts on GPUs that need not be there."""
