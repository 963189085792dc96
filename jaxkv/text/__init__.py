"""Text: tokenizers, and prompts as the model's chat template has them."""
