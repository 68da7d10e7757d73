"""Model files as read-only memory maps, and where a tensor lies in one."""

from __future__ import annotations

import mmap
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.errors import ModelFileError, ResourceError
from paceline.weights.quants import Bytes, TensorType

DAMAGED = "the file is damaged or incomplete; download it again and compare its checksum"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a tensor is, and where it lies in its file.

    Attributes:
        shape: numpy order, [rows, cols] for a matrix; ggml's dimensions reversed.
        offset: bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


def blank(info: TensorInfo) -> Bytes:
    """[nbytes] data of a tensor that is not read: finite, positive numbers, whatever the type.

    That of a matrix takes no memory.
    """
    if len(info.shape) < 2:
        return np.ones(info.nbytes, np.uint8)
    return np.broadcast_to(np.uint8(1), info.nbytes)


def map_file(path: Path, suffix: str) -> mmap.mmap:
    """Map a file of the kind `suffix`.

    Raises:
        ModelFileError: there is no such file, or it is none that can be read.
        ResourceError: the system cannot map it.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path} is a directory", f"give the path of the {suffix} file in it")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise ModelFileError(f"{path} is not a regular file", f"give the path of a {suffix} file on disk")
        if status.st_size == 0:
            raise ModelFileError(f"{path} is empty", DAMAGED)
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelFileError(f"{path} does not exist", "check the path") from None
    except PermissionError:
        raise ModelFileError(f"{path} cannot be read: permission denied", "check its permissions") from None
    except (OSError, ValueError) as error:
        raise ResourceError(f"{path} cannot be mapped: {error}", "check the path and the disk") from None


def drop_pages(memory: mmap.mmap, offset: int, nbytes: int) -> None:
    """Let the system drop the whole pages within a range; reading brings them back."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        memory.madvise(mmap.MADV_DONTNEED, start, end - start)
