"""Model files: where they come from, what lies in them, and what their bytes mean."""
