"""Names that nominate drafters, on disk and in a repository's list of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.weights.hub import choose, choose_file
from paceline.weights.sidecars import MOST, nominated, sidecar_of, without_sidecars


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


@pytest.mark.parametrize(
    "name",
    [
        "dflash-Q8_0.gguf",
        "Qwen3-4B-DFlash-b16.gguf",
        "EAGLE3-LLaMA3.1-Instruct-8B.gguf",
        "qwen3_8b_eagle3.gguf",
        "dspark_qwen3_4b_block7.gguf",
        "mtp-Q4_K_M.gguf",
        "model.nextn.gguf",
        "Qwen3-8B-speculator.gguf",
        "tiny-draft.gguf",
        "DFlash2.gguf",
    ],
)
def test_what_is_called_like_a_drafter_is_looked_into(name: str, tmp_path: Path) -> None:
    model = touch(tmp_path / "model.gguf")
    drafter = touch(tmp_path / name)
    assert nominated(model) == [drafter]


@pytest.mark.parametrize(
    "name", ["eaglet.gguf", "empty.gguf", "dflash.txt", "attempted.gguf", "overdraft.gguf"]
)
def test_other_names_nominate_nothing(name: str, tmp_path: Path) -> None:
    model = touch(tmp_path / "model.gguf")
    touch(tmp_path / name)
    assert nominated(model) == []


def test_where_is_looked(tmp_path: Path) -> None:
    folder = touch(tmp_path / "models" / "big" / "config.json").parent
    inside = touch(folder / "dflash" / "config.json").parent
    file = touch(folder / "mtp-q8.gguf")
    beside = touch(tmp_path / "models" / "big-DSpark" / "config.json").parent
    touch(folder / "eagle3" / "README.md")  # a folder without a model
    touch(folder / "deep" / "dflash" / "config.json")
    touch(tmp_path / "dflash.gguf")
    assert nominated(folder) == [inside, file, beside]
    assert nominated(tmp_path / "nowhere" / "model.gguf") == []


def test_a_model_is_no_drafter_of_its_own(tmp_path: Path) -> None:
    model = touch(tmp_path / "qwen-mtp.gguf")
    (tmp_path / "mtp.gguf").symlink_to(model)
    assert nominated(model) == []


def test_a_folder_full_of_drafters_is_not_all_read(tmp_path: Path) -> None:
    model = touch(tmp_path / "model.gguf")
    for i in range(MOST + 5):
        touch(tmp_path / f"dflash-{i:02}.gguf")
    assert nominated(model) == [tmp_path / f"dflash-{i:02}.gguf" for i in range(MOST)]


GGUF = [
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "mmproj-F16.gguf",
    "mtp-Q8_0.gguf",
    "mtp-Q4_K_M.gguf",
    "eagle3-F16.gguf",
]
FOLDER = ["config.json", "model.safetensors"]


def test_prefixes_do_not_stand_in_the_way_of_the_model() -> None:
    assert choose_file("o/r", GGUF, None) == "m-Q4_K_M.gguf"
    assert choose_file("o/r", GGUF, "Q8_0") == "m-Q8_0.gguf"
    assert without_sidecars(["dflash-Q8_0.gguf"]) == ["dflash-Q8_0.gguf"]
    assert choose_file("o/drafter", ["dflash-Q8_0.gguf"], None) == "dflash-Q8_0.gguf"
    assert choose("o/r", ["config.json", "model.safetensors", "mtp-Q8_0.gguf"], None) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    ("files", "chosen", "expected"),
    [
        (GGUF, "m-Q4_K_M.gguf", ["eagle3-F16.gguf"]),
        (GGUF[:5], "m-Q4_K_M.gguf", ["mtp-Q4_K_M.gguf"]),
        (GGUF[:5], "m-Q6_K.gguf", ["mtp-Q8_0.gguf"]),
        (["m.gguf", "dflash-b.gguf", "dflash-a.gguf"], "m.gguf", ["dflash-a.gguf"]),
        (GGUF[:3], "m-Q8_0.gguf", []),
        (GGUF, "mtp-Q8_0.gguf", []),
        ([*FOLDER, "dflash/config.json"], "config.json", []),
        (
            [
                "config.json",
                "dflash/config.json",
                "dflash/model.safetensors",
                "dflash/x.py",
                "model.safetensors",
            ],
            "config.json",
            ["dflash/config.json", "dflash/model.safetensors"],
        ),
    ],
)
def test_one_drafter_is_fetched_with_a_model(files: list[str], chosen: str, expected: list[str]) -> None:
    assert sidecar_of(files, chosen) == expected
