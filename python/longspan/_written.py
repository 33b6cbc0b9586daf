"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file beside `path`, which then takes its name: whoever reads finds the
    old one or the new one. OSError where that cannot be."""
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent or Path("."))
    os.close(handle)
    try:
        write(Path(beside))
        os.chmod(beside, 0o666 & ~_umask())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def check_writable(path: Path) -> str | None:
    """Why a file cannot be written there, before the work is done; None where it can."""
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():
        return "it is no ordinary file, and would be replaced by one"
    if not path.parent.is_dir():
        return f"there is no folder '{path.parent}'"
    if not os.access(path.parent, os.W_OK):
        return f"the folder '{path.parent}' may not be written to"
    return None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
