"""Text in and out of a model: tokenizers with chat templates (`tokenizer`), prompts to token ids (`prompts`)."""
