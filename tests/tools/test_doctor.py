from __future__ import annotations

from pathlib import Path

import pytest

from paceline.tools import provenance
from paceline.tools.doctor import diagnose


def test_the_report_names_the_cache_and_our_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "not" / "there"))
    found = diagnose(threads=1)
    assert found.cache["path"] == str(tmp_path / "not" / "there")
    assert found.cache["exists"] is False
    assert found.cache["free_bytes"] > 0
    assert found.provenance["environment"]["PACELINE_CACHE"] == str(tmp_path / "not" / "there")
    assert not (tmp_path / "not").exists()
    assert found.kernels[-1] == "portable"
    assert found.threads == 1
    assert found.read_bandwidth is not None
    assert found.read_bandwidth > 0


def test_provenance_is_complete() -> None:
    found = provenance.provenance()
    assert found["machine"]["logical_cores"] >= 1
    assert found["machine"]["memory_bytes"] > 1 << 28
    assert found["machine"]["cpu"]
    assert set(found["versions"]) == {"python", *provenance.PACKAGES}
    assert provenance.version("no-such-package-anywhere") == "not installed"


def test_a_file_is_described_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"abc")
    assert provenance.describe_file(path) == {
        "name": "model.gguf",
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
