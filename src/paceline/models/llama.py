"""Llama, and what converters store under its name: Llama 2 and 3, Mistral, Mixtral, SmolLM2.

Their query and key rows come permuted, so that rope turns neighbouring dimensions.
"""

from paceline.models.architecture import Architecture

ARCHITECTURE = Architecture(interleaved=True)
