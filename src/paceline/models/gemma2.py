"""Gemma 2: norms on both sides, gelu, capped scores and logits, and a window in every other layer.

The norms' ones are already added to their weights in a GGUF file.
"""

from paceline.models.architecture import Architecture

ARCHITECTURE = Architecture(
    gelu=True,
    post_norms=True,
    scaled_embedding=True,
    window_period=2,
    wide_scale_layers=46,  # 27B
)
