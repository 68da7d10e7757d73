"""Text and token ids: tokenizers from GGUF metadata, chat templates, decoding while tokens arrive.

Knows nothing of models, requests or drafters. Import from its modules: `tokenizer`, `template`, `stream`.
"""
