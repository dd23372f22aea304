"""Files that are either whole or not there: written under a temporary name, then renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from asu_interp.errors import RunError


def cache_dir() -> Path:
    """The user's cache for converted and memorised models: $ASU_INTERP_CACHE, else ~/.cache/asu-interp."""
    return Path(os.environ.get("ASU_INTERP_CACHE") or Path.home() / ".cache" / "asu-interp")


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step; on an error (full disk) the old file stays. Raises RunError."""
    _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: Any) -> None:
    """Replace `path` by `data` as strict JSON (no NaN, no infinity). Raises RunError."""
    try:
        text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise RunError(f"cannot write {path}: {error}") from error
    write_text(path, text + "\n")


def read_json(path: Path, what: str = "file") -> Any:
    """The JSON in `path`. Raises RunError naming file, line and column where it is broken."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{what} {path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RunError(f"{what} {path}: not readable as JSON: {error}") from error


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that replaces `path` when the block ends well and vanishes when it does not."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():  # moved aside, not deleted: whenever the process is killed, one of the two is whole
            shutil.rmtree(_aside(path), ignore_errors=True)
            path.rename(_aside(path))
        temporary.rename(path)
        shutil.rmtree(_aside(path), ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def recover_directory(path: Path) -> None:
    """Put back what a killed `new_directory` had moved aside, and clear away what it left half-written."""
    if not path.exists() and _aside(path).is_dir():
        _aside(path).rename(path)
    for left in path.parent.glob(f".{path.name}.*"):
        shutil.rmtree(left, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    path = Path(path)
    if path.is_dir():
        raise RunError(f"cannot write {path}: is a directory")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
