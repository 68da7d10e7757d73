"""Qwen 3 with experts: Qwen 3, but a router chooses a few of many feed-forward networks for each token."""

from paceline.models.architecture import Architecture

ARCHITECTURE = Architecture(head_norm=True)
