"""Gemma 3, its text part: Gemma 2 with norms on query and key heads instead of caps.

Five of six layers see a window only, and turn at a base of their own.
"""

from paceline.models.architecture import Architecture

ARCHITECTURE = Architecture(
    head_norm=True,
    gelu=True,
    post_norms=True,
    scaled_embedding=True,
    window_period=6,
    local_rope_base=10000.0,
    wide_scale_layers=62,  # 27B
)
