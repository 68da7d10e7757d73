"""Prometheus metrics, in vLLM's names behind `paceline:`, and the line in the log."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from paceline.core import Completion
from paceline.engine import Chunk
from paceline.engine.service import Service, ServiceStats

_PREFIX = "paceline:"
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token", _SLOW),
    "inter_token_latency_seconds": ("Between tokens; those of one pass share its time evenly", _FAST),
    "e2e_request_latency_seconds": ("From arrival to the end of a text", _SLOW),
    "request_queue_time_seconds": ("From arrival to the first pass", _SLOW),
    "request_prefill_time_seconds": ("Passes of a text's prompt", _SLOW),
    "request_decode_time_seconds": ("Passes of a text's tokens behind the first", _SLOW),
}


class Histogram:
    """Counts values by size. Written by one thread at a time; a reader may see it a moment old."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that), as Prometheus wants them."""
        running, found = 0, []
        names = [*map(str, self.bounds), "+Inf"]
        for name, count in zip(names, list(self.counts), strict=True):
            running += count
            found.append((name, float(running)))
        return found


class Metrics:
    """Everything that /metrics tells.

    Args:
        model: value of the label `model_name`.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._service: Service | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._finished = dict.fromkeys(("stop", "length", "abort", "error"), 0)

    def watch(self, service: Service) -> None:
        """Take the engine's numbers from here on from `service`."""
        self._service = service

    def snapshot(self) -> ServiceStats | None:
        return None if self._service is None else self._service.snapshot()

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def observer(self) -> Observer:
        """One request's way to tell what it gets."""
        return Observer(self._histograms, self._finished)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        labels = ["model_name"]
        for name, (text, _) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(_PREFIX + name, text, labels=labels)
            histogram = self._histograms[name]
            family.add_metric([self._model], histogram.buckets(), histogram.sum)
            yield family
        finished = CounterMetricFamily(
            _PREFIX + "request_success", "Texts that ended, by how", labels=[*labels, "finished_reason"]
        )
        for reason, count in self._finished.items():
            finished.add_metric([self._model, reason], count)
        yield finished
        stats = self.snapshot()
        if stats is not None:
            yield from self._engine(stats)

    def _engine(self, stats: ServiceStats) -> Iterator[Metric]:
        labels = ["model_name"]
        gauges = {
            "num_requests_running": ("Texts being written", stats.running),
            "num_requests_waiting": ("Texts not begun", stats.waiting),
            "kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1", stats.kv_used),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
            gauge.add_metric([self._model], value)
            yield gauge
        counters = {
            "prompt_tokens": ("Prompt tokens", stats.prompt_tokens),
            "generation_tokens": ("Tokens written", stats.generated_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up in the cache", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found there", stats.prefix_hits),
            "num_preemptions": ("Times a text was put back to be recomputed", stats.preemptions),
            "model_passes": ("Passes of the model", stats.passes),
            "spec_decode_num_drafts": ("Passes that checked a draft", stats.drafts),
            "spec_decode_num_draft_tokens": ("Draft tokens checked", stats.drafted),
            "spec_decode_num_accepted_tokens": ("Draft tokens kept", stats.accepted),
        }
        for name, (text, number) in counters.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=labels)
            counter.add_metric([self._model], number)
            yield counter
        yield from self._by_label(stats)

    def _by_label(self, stats: ServiceStats) -> Iterator[Metric]:
        positions = CounterMetricFamily(
            _PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Drafts kept up to and with this position",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(stats.accepted_per_position):
            positions.add_metric([self._model, str(position)], count)
        yield positions
        for name in ("drafted", "accepted"):
            family = CounterMetricFamily(
                f"{_PREFIX}spec_decode_{name}_by_drafter",
                f"Draft tokens {name}, by who guessed them",
                labels=["model_name", "drafter"],
            )
            for drafter, found in stats.by_drafter.items():
                family.add_metric([self._model, drafter], getattr(found, name))
            yield family


class Observer:
    """Follows the chunks of one request, on the engine's thread."""

    def __init__(self, histograms: dict[str, Histogram], finished: dict[str, int]) -> None:
        self._histograms = histograms
        self._finished = finished
        self._started = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}

    def __call__(self, prompt: int, item: Chunk | Exception) -> None:
        if isinstance(item, Exception):
            self._finished["error"] += 1
            return
        if item.tokens:
            now = time.perf_counter()
            key = (prompt, item.index)
            last = self._last.get(key)
            if last is None:
                self._histograms["time_to_first_token_seconds"].observe(now - self._started)
            else:
                count = len(item.tokens)
                self._histograms["inter_token_latency_seconds"].observe((now - last) / count, count)
            self._last[key] = now
        if item.completion is not None:
            self._end(item.completion)

    def _end(self, completion: Completion) -> None:
        self._finished[completion.finish_reason] += 1
        timings, observe = completion.timings, self._histograms
        elapsed = time.perf_counter() - self._started
        queued = max(0.0, elapsed - timings.prefill_s - timings.decode_s)
        observe["e2e_request_latency_seconds"].observe(elapsed)
        observe["request_queue_time_seconds"].observe(queued)
        observe["request_prefill_time_seconds"].observe(timings.prefill_s)
        observe["request_decode_time_seconds"].observe(timings.decode_s)


class Activity:
    """Says in one line what happened since it was last asked; None when nothing did."""

    def __init__(self) -> None:
        self._then: ServiceStats | None = None
        self._at = time.perf_counter()

    def line(self, now: ServiceStats) -> str | None:
        then, at = self._then, self._at
        self._then, self._at = now, time.perf_counter()
        if then is not None and now.passes == then.passes and now.waiting == 0:
            return None
        if then is None and not now.passes:
            return None
        seconds = max(self._at - at, 1e-9)

        def since(name: str) -> Any:
            return getattr(now, name) - (getattr(then, name) if then is not None else 0)

        parts = [
            f"running {now.running}, waiting {now.waiting}",
            f"{since('prompt_tokens') / seconds:.1f} prompt tokens/s",
            f"{since('generated_tokens') / seconds:.1f} new tokens/s",
            f"KV cache {now.kv_used:.0%}",
        ]
        if queries := since("prefix_queries"):
            parts.append(f"prefix hits {since('prefix_hits') / queries:.0%}")
        if drafts := since("drafts"):
            kept = since("accepted")
            parts.append(
                f"drafts: {1 + kept / drafts:.2f} tokens per pass, {kept}/{since('drafted')} accepted"
            )
        return " · ".join(parts)
