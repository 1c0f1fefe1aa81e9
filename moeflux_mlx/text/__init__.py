"""Text to tokens and back: tokenizers, chat templates, and what a model's text means."""
