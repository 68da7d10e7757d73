"""Qwen 3: a norm on every query and key head instead of Qwen 2's biases."""

from paceline.models.architecture import Architecture

ARCHITECTURE = Architecture(head_norm=True)
