"""Text and token ids: tokenizers, chat templates, decoding while tokens arrive, grammars, tool calls.

Knows nothing of models, requests or drafters. Import from its modules: `tokenizer`, `template`, `stream`,
`grammar`, `tool_calls`.
"""
