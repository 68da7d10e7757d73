"""Phi 3, 3.5 and 4: fused matrices, and LongRoPE in the models for long texts."""

from paceline.models.architecture import Architecture

ARCHITECTURE = Architecture(fused=True)
