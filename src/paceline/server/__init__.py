"""An OpenAI-compatible HTTP server over `engine.service`. Start with `app`, which holds the routes."""
