"""The model behind a server: absent while it loads, then ready, then draining."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from paceline.engine import LLM
from paceline.engine.service import Service
from paceline.server.failures import RETRY_AFTER_S, ApiError
from paceline.server.metrics import Metrics
from paceline.server.settings import Settings

_FILE_DEFAULTS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model that takes requests.

    Attributes:
        defaults: sampling parameters that the model's file recommends.
    """

    llm: LLM
    service: Service
    defaults: Mapping[str, Any] = field(default_factory=dict)


class Backend:
    """Holds the model for the routes.

    Attributes:
        created: when the server started, as a Unix time.
        slow: few threads, for what can take seconds and much memory: grammars, megabytes of text.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.names[0])
        self.created = int(time.time())
        self.slow = ThreadPoolExecutor(2, "paceline-slow")
        self._model: Model | None = None
        self._ending = False

    @property
    def model(self) -> Model:
        """The model. Raises ApiError 503 while there is none."""
        if self._ending:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self._model is None:
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            raise ApiError(503, "the model is still loading", code="model_loading", headers=headers)
        return self._model

    def serve(self, llm: LLM, metadata: Mapping[str, Any] | None = None) -> None:
        """Begin to take requests for `llm`.

        Args:
            metadata: of the model's file.
        """
        limits = {"max_queue": self.settings.max_queue, "max_num_seqs": self.settings.max_num_seqs}
        service = Service(llm, **limits)  # type: ignore[arg-type]
        self.metrics.watch(service)
        self._model = Model(llm, service, file_defaults(metadata or {}))

    def end(self) -> None:
        """Refuse new requests; what runs goes on."""
        self._ending = True

    def close(self) -> None:
        """Cancel what still runs, and let go of the model."""
        self._ending = True
        self.slow.shutdown(wait=False, cancel_futures=True)
        if self._model is not None:
            self._model.service.close()
            self._model.llm.close()


def file_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that a model file recommends for itself."""
    found = {name: metadata[key] for key, name in _FILE_DEFAULTS.items() if key in metadata}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
