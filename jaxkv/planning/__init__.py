"""Plans memory and estimates time of a model, a policy and prompts on GPUs, present or not."""
