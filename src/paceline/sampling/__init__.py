"""Arithmetic on logits: noise by position, processors, the sampler and the verification of drafts.

Knows nothing of models, text, drafters or requests.
"""

from paceline.sampling.noise import Noise
from paceline.sampling.sampler import Sampler
from paceline.sampling.verify import walk

__all__ = ["Noise", "Sampler", "walk"]
