"""Qwen 2 and 2.5: biases on query, key and value, which are taken wherever a file has them."""

from paceline.models.architecture import Architecture

ARCHITECTURE = Architecture()
