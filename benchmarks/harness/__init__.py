"""What the benchmark scripts share: prompts, other engines, and how results are written down."""
