"""From names to files: aliases through a real pip, hub references through the real client."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from paceline.errors import ModelFileError, ResourceError, UnsupportedModelError, UsageError
from paceline.weights import hub
from paceline.weights.hub import WheelModel, choose, choose_file, pull, resolve
from support.privileges import without_privileges

SOURCES = Path(hub.__file__).parents[2]
PAYLOAD = b"GGUF" + bytes(range(256)) * 400
TINY = WheelModel(
    "paceline-tiny==1.0", 1 << 17, "tiny/tiny.gguf", len(PAYLOAD), hashlib.sha256(PAYLOAD).hexdigest()
)


def make_wheel(directory: Path, payload: bytes = PAYLOAD, member: str = TINY.member) -> None:
    directory.mkdir(exist_ok=True)
    info = "paceline_tiny-1.0.dist-info"
    files: dict[str, bytes] = {
        member: payload,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: paceline-tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile(
        directory / "paceline_tiny-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED
    ) as archive:
        for name, raw in files.items():
            archive.writestr(name, raw)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, an alias `tiny`, and a pip that sees only the wheels of tmp_path/wheels."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setitem(hub.ALIASES, "tiny", TINY)
    make_wheel(tmp_path / "wheels")
    return tmp_path / "cache" / "models"


def remove_wheels(tmp_path: Path) -> None:
    for wheel in (tmp_path / "wheels").iterdir():
        wheel.unlink()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_an_alias_is_fetched_once(cache: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = resolve("tiny", lambda done, total: seen.append((done, total)))
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == PAYLOAD
    assert names(cache) == ["tiny.gguf"]
    assert seen
    assert all(0 <= done <= total == TINY.wheel_size for done, total in seen)
    remove_wheels(tmp_path)
    assert resolve("tiny") == pull("tiny") == path


def test_a_cached_file_of_another_size_is_fetched_again(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(PAYLOAD[:-1])
    assert resolve("tiny").read_bytes() == PAYLOAD


def test_pull_mends_a_changed_byte(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(b"X" + PAYLOAD[1:])
    assert pull("tiny").read_bytes() == PAYLOAD


def test_an_alias_wins_over_a_file_of_its_name(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_bytes(b"mine")
    assert resolve("tiny") == cache / "tiny.gguf"
    assert resolve("./tiny").read_bytes() == b"mine"


def test_pulls_at_once_agree(cache: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(lambda _: pull("tiny"), range(3))) == {cache / "tiny.gguf"}
    assert names(cache) == ["tiny.gguf"]
    assert (cache / "tiny.gguf").read_bytes() == PAYLOAD


def refused(model: str = "tiny") -> str:
    with pytest.raises(ResourceError) as caught:
        pull(model)
    assert caught.value.hint
    return caught.value.message


def test_another_file_under_the_same_name_is_refused(cache: Path, tmp_path: Path) -> None:
    other = bytes(len(PAYLOAD))
    make_wheel(tmp_path / "wheels", other)
    found = hashlib.sha256(other).hexdigest()
    assert refused() == f"tiny.gguf from paceline-tiny==1.0 has SHA-256 {found}, not {TINY.sha256}"
    assert names(cache) == []


def test_a_bomb_in_the_wheel_is_read_no_further_than_the_models_size(cache: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", bytes(64 << 20))
    assert "has SHA-256" in refused()
    assert names(cache) == []


def test_a_wheel_without_the_model(cache: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", member="tiny/other.gguf")
    assert "no item named 'tiny/tiny.gguf'" in refused()


def test_a_broken_wheel(cache: Path, tmp_path: Path) -> None:
    wheel = next((tmp_path / "wheels").iterdir())
    wheel.write_bytes(wheel.read_bytes()[:500])
    assert "paceline" in refused()
    assert names(cache) == []


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    message = refused()
    assert message.startswith("pip could not download paceline-tiny==1.0: ERROR: No matching distribution")
    assert names(cache) == []


def test_too_little_space(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.ALIASES, "tiny", replace(TINY, size=1 << 60))
    assert f"{(1 << 60) + TINY.wheel_size >> 20} MiB are needed" in refused()


def test_a_write_that_fails_leaves_nothing_behind(cache: Path, tmp_path: Path) -> None:
    """A limit on file sizes fails a write as a full disk does: half-way."""
    make_wheel(tmp_path / "wheels", PAYLOAD)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(PAYLOAD) // 2, limits[1]))
    try:
        message = refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message == f"cannot store the model under {cache}: File too large"
    assert names(cache) == []


def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with without_privileges():
        message = refused()
    tmp_path.chmod(0o700)
    assert message == f"cannot store the model under {cache}: Permission denied"


def test_a_cache_that_is_a_file(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert refused() == f"cannot store the model under {cache}: Not a directory"


def without_site_packages(cache: Path, path: Path) -> subprocess.Popen[str]:
    """Pull `tiny` in an interpreter that has no pip of its own, as in environments made by uv."""
    script = (
        "from paceline.weights import hub\nfrom paceline.errors import ResourceError\n"
        f"hub.ALIASES['tiny'] = hub.WheelModel(**{asdict(TINY)})\n"
        "try:\n    print(hub.pull('tiny', lambda done, total: print('polled', flush=True)))\n"
        "except ResourceError as error:\n    print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "PATH": str(path)}
    return subprocess.Popen(
        [sys.executable, "-S", "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def make_pip(directory: Path, body: str) -> None:
    directory.mkdir()
    (directory / "pip3").write_text(f"#!/bin/sh\n{body}\n")
    (directory / "pip3").chmod(0o700)


def test_no_pip(cache: Path, tmp_path: Path) -> None:
    out, _ = without_site_packages(cache, tmp_path / "empty").communicate()
    assert out.startswith("the demo model is fetched with pip, and there is none\nhint: run `")


def test_a_pip_elsewhere_will_do(cache: Path, tmp_path: Path) -> None:
    make_pip(tmp_path / "bin", f'unset PYTHONPATH; exec "{sys.executable}" -m pip "$@"')
    out, _ = without_site_packages(cache, tmp_path / "bin").communicate()
    assert out.endswith(f"\n{cache}/tiny.gguf\n")
    assert (cache / "tiny.gguf").read_bytes() == PAYLOAD


def test_an_interrupted_pull_ends_pip_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    make_pip(tmp_path / "bin", f"echo $$ > {tmp_path}/started; exec /bin/sleep 600")
    pull_process = without_site_packages(cache, tmp_path / "bin")
    pip_id = int((tmp_path / "started").read_text())
    assert pull_process.stdout is not None
    assert pull_process.stdout.readline() == "polled\n"
    pull_process.send_signal(signal.SIGINT)
    _, error = pull_process.communicate(timeout=60)
    assert error.endswith("KeyboardInterrupt\n")
    with pytest.raises(ProcessLookupError):
        os.kill(pip_id, 0)
    assert names(cache) == []


# Where the cache is


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/a/cache", "/xdg", "/a/cache"),
        ("~/c", "", "/home/u/c"),
        ("", "/xdg", "/xdg/paceline"),
        ("", "relative", "/home/u/.cache/paceline"),
        ("", "", "/home/u/.cache/paceline"),
    ],
)
def test_cache_directory(own: str, xdg: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", "/home/u")
    assert hub.cache_dir() == Path(expected)


# Names that mean nothing


@pytest.mark.parametrize("ask", [resolve, pull])
def test_names_that_mean_nothing(ask: object, tmp_path: Path) -> None:
    assert callable(ask)
    with pytest.raises(UsageError, match=r"unknown model 'smolm2'.*\nhint: did you mean 'smollm2'"):
        ask("smolm2")
    with pytest.raises(UsageError, match="unknown model ''"):
        ask("")
    with pytest.raises(UsageError, match="unknown model 'a/b/c'"):
        ask("a/b/c")
    with pytest.raises(ModelFileError, match="does not exist"):
        ask(str(tmp_path / "none"))
    with pytest.raises(ModelFileError, match="does not exist"):
        ask("models/none.gguf")


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert resolve(str(file)) == file
    with pytest.raises(UsageError, match="is here already"):
        pull(str(file))


# Which file of a repository

FILES = [
    "README.md",
    "m-Q2_K.gguf",
    "m-Q4_K_M.gguf",
    "m-q8_0.gguf",
    "m-IQ4_XS.gguf",
    "mmproj-m-f16.gguf",
    "big/m-F16-00001-of-00002.gguf",
    "big/m-F16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("files", "quant", "expected"),
    [
        (FILES, None, "m-Q4_K_M.gguf"),
        (FILES, "q4_k_m", "m-Q4_K_M.gguf"),
        (FILES, "Q8_0", "m-q8_0.gguf"),
        (FILES, "IQ4_XS", "m-IQ4_XS.gguf"),
        (["only.gguf", "x.safetensors"], None, "only.gguf"),
        (["m_q4_0.gguf", "m_iq4_0.gguf"], "Q4_0", "m_q4_0.gguf"),
        (["SmolLM2.Q4_1.gguf", "SmolLM2.Q4_0.gguf"], "Q4_1", "SmolLM2.Q4_1.gguf"),
    ],
)
def test_one_file_is_chosen(files: list[str], quant: str | None, expected: str) -> None:
    assert choose_file("o/r@main", files, quant) == expected


@pytest.mark.parametrize(
    ("files", "quant", "named"),
    [
        (FILES, "Q4_K", "o/r@main has no file of quant 'Q4_K'\nhint: add :QUANT for one of .*m-Q2_K.gguf"),
        (FILES, "Q4", "no file of quant 'Q4'"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "has several files of quant 'Q4_0'"),
        (["a-Q4_0.gguf", "b-Q8_0.gguf"], None, "has no file of quant 'Q4_K_M'"),
        (["model.safetensors"], None, "o/r@main has no GGUF file, nor a folder of safetensors"),
        (["pytorch_model.bin", "config.json"], None, "has no GGUF file, nor a folder of safetensors"),
    ],
)
def test_none_is_guessed(files: list[str], quant: str | None, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        choose_file("o/r@main", files, quant)


def test_split_models_are_refused_before_they_are_fetched() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"big/m-F16-00001-of-00002.gguf is one part of a split model"
    ):
        choose_file("o/r@main", FILES, "F16")


FOLDER = [
    "README.md",
    "config.json",
    "consolidated.safetensors",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "onnx/model.safetensors",
    "pytorch_model.bin",
    "tokenizer.json",
    "tokenizer.model",
]


def test_a_folder_is_chosen_without_duplicates() -> None:
    assert choose("o/r@main", FOLDER, None) == [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert choose("o/r@main", [*FOLDER, "model.safetensors"], None)[-1] == "model.safetensors"
    assert choose("o/r@main", ["odd.safetensors", "config.json"], None) == ["config.json", "odd.safetensors"]
    assert choose("o/r@main", [*FOLDER, "m.gguf"], None) == ["m.gguf"]
    with pytest.raises(UsageError, match=r"no file of quant 'q8'\nhint: leave :q8 out; --quantize q8"):
        choose("o/r@main", FOLDER, "q8")


# The hub, as its client sees it

COMMIT = "1" * 40


class HubHandler(BaseHTTPRequestHandler):
    """The few answers of a model hub that listing and fetching need."""

    repositories: ClassVar = {
        "org/name-GGUF": {"m-Q4_K_M.gguf": b"four", "m-Q8_0.gguf": b"eight", "README.md": b""},
        "org/folder": {"config.json": b"{}", "model.safetensors": b"weights", "model.bin": b"pickle"},
        "org/both-GGUF": {"m-Q8_0.gguf": b"eight", "mtp-Q8_0.gguf": b"head", "dflash-Q4_0.gguf": b"block"},
    }

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0]
        for repo, files in self.repositories.items():
            if path == f"/api/models/{repo}/revision/main":
                siblings = [{"rfilename": name} for name in files]
                body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
                return self.reply(200, body, {"Content-Type": "application/json"})
            name = path.rsplit("/", 1)[-1]
            if path in (f"/{repo}/resolve/main/{name}", f"/{repo}/resolve/{COMMIT}/{name}"):
                etag = hashlib.sha1(files[name]).hexdigest()
                return self.reply(200, files[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})
        wrong = "RevisionNotFound" if "name-GGUF" in path else "RepoNotFound"
        return self.reply(404, b"{}", {"X-Error-Code": wrong, "X-Error-Message": wrong})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask_hub(model: str, endpoint: str, home: Path, **more: str) -> str:
    """Resolve in a process of its own: the hub's client reads its variables when it is imported."""
    script = (
        "import sys\nfrom paceline.errors import PacelineError\nfrom paceline.weights import hub\n"
        "try:\n    print(hub.resolve(sys.argv[1]))\n"
        "except PacelineError as error:\n    print(type(error).__name__, error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"PYTHONPATH": str(SOURCES), "HF_ENDPOINT": endpoint, "HF_HOME": str(home), **more}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, model], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_hub_reference_is_fetched_and_then_found_offline(endpoint: str, tmp_path: Path) -> None:
    path = Path(ask_hub("org/name-GGUF", endpoint, tmp_path))
    assert path.name == "m-Q4_K_M.gguf"
    assert path.read_bytes() == b"four"
    assert tmp_path in path.parents
    assert Path(ask_hub("org/name-GGUF@main:q8_0", endpoint, tmp_path)).read_bytes() == b"eight"

    assert ask_hub("org/name-GGUF", endpoint, tmp_path, HF_HUB_OFFLINE="1") == str(path)
    assert ask_hub("org/name-GGUF", "http://127.0.0.1:9", tmp_path) == str(path)
    missing = ask_hub("org/name-GGUF:Q2_K", endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert missing.startswith("UsageError org/name-GGUF@main in the cache has no file of quant 'Q2_K'")


def test_a_folder_is_fetched_and_then_found_offline(endpoint: str, tmp_path: Path) -> None:
    path = Path(ask_hub("org/folder", endpoint, tmp_path))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }
    assert ask_hub("org/folder@main", endpoint, tmp_path, HF_HUB_OFFLINE="1") == str(path)
    assert ask_hub("org/folder", "http://127.0.0.1:9", tmp_path) == str(path)


def test_a_repositorys_drafter_comes_with_its_model(endpoint: str, tmp_path: Path) -> None:
    path = Path(ask_hub("org/both-GGUF:Q8_0", endpoint, tmp_path))
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == {
        "m-Q8_0.gguf": b"eight",
        "dflash-Q4_0.gguf": b"block",
    }
    assert ask_hub("org/both-GGUF:Q8_0", "http://127.0.0.1:9", tmp_path) == str(path)


def test_what_the_hub_does_not_have(endpoint: str, tmp_path: Path) -> None:
    assert ask_hub("org/other", endpoint, tmp_path).startswith("ResourceError cannot fetch org/other@main")
    assert ask_hub("org/name-GGUF@v9", endpoint, tmp_path).startswith(
        "ResourceError cannot fetch org/name-GGUF@v9"
    )
    assert ask_hub("org/name-GGUF:Q2_K", endpoint, tmp_path).startswith(
        "UsageError org/name-GGUF@main has no file of quant 'Q2_K'\nhint: add :QUANT for one of m-Q4_K_M.gguf"
    )


def test_offline_with_an_empty_cache(endpoint: str, tmp_path: Path) -> None:
    out = ask_hub("org/name-GGUF", endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert out.startswith("ResourceError cannot fetch org/name-GGUF@main from the hub: ")
    assert "HF_HUB_OFFLINE" in out
    out = ask_hub("org/name-GGUF", "http://127.0.0.1:9", tmp_path)
    assert out.startswith("ResourceError cannot fetch org/name-GGUF@main from the hub: ")
