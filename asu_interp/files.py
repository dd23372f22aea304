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
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, what: str = "file") -> Any:
    """The JSON in `path`. Raises RunError naming file, line and column where it is broken."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{what} {path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RunError(f"{what} {path}: not readable as JSON: {error}") from error


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file under a temporary name, then put it at `path`. Raises RunError."""
    _replace(path, write)


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
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
