"""Metrics: exact counts in the names that dashboards know, and a line in the log when something happens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.core import DrafterStats, SpeculationStats
from paceline.engine.service import ServiceStats
from paceline.server import figures
from paceline.server.metrics import Activity, Histogram
from support.live_server import Live, chat_llm, live_server, until

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


@pytest.fixture
def live() -> Iterator[Live]:
    with live_server(chat_llm()) as running:
        yield running


def values(live: Live) -> dict[str, float]:
    """Samples by name and labels, without the model's name, which each must have."""
    found = {}
    for family in text_string_to_metric_families(live.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "stub"
            more = "".join(f"{{{value}}}" for value in labels.values())
            found[sample.name.removeprefix("paceline:") + more] = sample.value
    return found


def test_counts_are_exact(live: Live) -> None:
    before = values(live)
    assert before["generation_tokens_total"] == before["num_requests_running"] == 0
    body = {"prompt": "abcabcabcabc", "max_tokens": 60, "temperature": 0}
    whole = live.post("/v1/completions", body).json()
    again = live.stream("/v1/completions", body | {"n": 2})[-1]
    assert live.post("/v1/completions", body | {"temperature": 101}).status_code == 400
    until(live.idle)
    found = values(live)
    answers = [whole, again]
    spec = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert found["generation_tokens_total"] == 180
    assert found["request_success_total{length}"] == 3
    assert found["request_success_total{stop}"] == found["request_success_total{error}"] == 0
    assert found["time_to_first_token_seconds_count"] == 3
    assert found["e2e_request_latency_seconds_count"] == found["request_decode_time_seconds_count"] == 3
    assert found["inter_token_latency_seconds_count"] == 3 * 59
    assert found["inter_token_latency_seconds_bucket{+Inf}"] == 3 * 59
    for name, key in (
        ("drafts", "num_spec_steps"),
        ("draft_tokens", "num_draft_tokens"),
        ("accepted_tokens", "num_accepted_draft_tokens"),
    ):
        assert found[f"spec_decode_num_{name}_total"] == sum(s[key] for s in spec)
    positions = [v for k, v in found.items() if k.startswith("spec_decode_num_accepted_tokens_per_pos")]
    assert sum(positions) == found["spec_decode_num_accepted_tokens_total"] > 0
    assert found["spec_decode_accepted_by_drafter_total{suffix}"] == sum(positions)
    assert found["kv_cache_usage_perc"] == 0
    assert found["prefix_cache_hits_total"] > 0


def test_a_request_that_is_cut_off_counts_as_aborted(live: Live) -> None:
    body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "timeout": 0.001}
    assert live.post("/v1/completions", body).status_code == 408
    until(lambda: values(live)["request_success_total{abort}"] == 1)


def test_the_page_names_every_metric_and_no_other(live: Live) -> None:
    body = {"prompt": "abcabcabcabc", "max_tokens": 60, "temperature": 0}
    live.post("/v1/completions", body)
    families = {
        family.name.removeprefix("paceline:")
        for family in text_string_to_metric_families(live.get("/metrics").text)
    }
    table = PAGE.partition("## Metrics")[2]
    named = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert named == families


def test_vllm_s_definitions() -> None:
    """Ten rounds of three, of which five kept none, two one, none two, three three."""
    stats = SpeculationStats(
        passes=10, drafts=10, drafted=30, accepted=11, accepted_per_position=[5, 3, 3], committed=21,
        by_drafter={"suffix": DrafterStats(30, 11)},
    )  # fmt: skip
    found = figures.speculative_decoding([stats])
    assert found["acceptance_histogram"] == [5, 2, 0, 3]
    assert found["mean_acceptance_length"] == found["tokens_per_pass"] == 2.1
    assert found["draft_acceptance_rate"] == 0.366667
    assert (found["num_spec_steps"], found["num_draft_tokens"]) == (10, 30)
    assert found["num_accepted_draft_tokens"] == 11
    assert found["by_drafter"] == {"suffix": {"drafted": 30, "accepted": 11}}
    assert figures.histogram([stats, SpeculationStats(drafts=2)]) == [7, 2, 0, 3]
    nothing = figures.speculative_decoding([SpeculationStats(passes=4, committed=4, off_reason="because")])
    assert nothing["mean_acceptance_length"] == nothing["tokens_per_pass"] == 1.0
    assert nothing["off_reason"] == "because"


def test_a_histogram_counts_what_is_at_most_its_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((1.0, 1), (1.5, 3), (2.5, 2)):
        histogram.observe(value, times)
    assert histogram.buckets() == [("1.0", 1.0), ("2.0", 4.0), ("+Inf", 6.0)]
    assert histogram.sum == 10.5


def stats(**more: float) -> ServiceStats:
    nothing = dict.fromkeys(ServiceStats.__dataclass_fields__, 0)
    return ServiceStats(**nothing | {"accepted_per_position": (), "by_drafter": {}} | more)  # type: ignore[arg-type]


def test_the_log_has_a_line_when_something_happened() -> None:
    activity = Activity()
    assert activity.line(stats()) is None
    line = activity.line(
        stats(running=2, waiting=1, passes=5, drafts=4, drafted=10, accepted=6, kv_used=0.25)
    )
    assert line is not None
    assert "running 2, waiting 1" in line
    assert "KV cache 25%" in line
    assert "drafts: 2.50 tokens per pass, 6/10 accepted" in line
    assert activity.line(stats(passes=5)) is None
    assert activity.line(stats(passes=6)) is not None
