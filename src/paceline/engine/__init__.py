"""Requests, the step of draft, plan, check and commit, and the Python API."""

from paceline.engine.llm import LLM, Stream
from paceline.engine.request import Chunk

__all__ = ["LLM", "Chunk", "Stream"]
