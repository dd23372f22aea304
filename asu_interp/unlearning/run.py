"""A run's directory: config.json, log.jsonl, checkpoint/, model/, summary.json, report.html."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asu_interp.errors import RunError
from asu_interp.files import new_directory, read_json, recover_directory, write_json, write_text

OURS = ("config.json", "log.jsonl", "summary.json", "report.html", "evaluation.json", "heads.json", "locate.json",
        "response.json", "response-all-heads.json", "selectivity.json", "status.json",
        "checkpoint", "model")  # fmt: skip


def check_directory(path: str | Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Raise RunError if a run may not be written to `path`; nothing is changed."""
    path = Path(path)
    if overwrite and resume:
        raise RunError("--overwrite and --resume exclude each other")
    if path.exists() and not path.is_dir():
        raise RunError(f"{path}: is a file, not a directory")
    held = (path / "config.json").is_file()
    if path.is_dir() and any(path.iterdir()) and not held:
        raise RunError(f"{path}: holds files but no run; choose an empty or new directory")
    if held and not (overwrite or resume):
        raise RunError(f"{path}: holds a run already; add --overwrite to replace it or --resume to go on")
    above = next(p for p in (path, *path.resolve().parents) if p.exists())
    if not above.is_dir():
        raise RunError(f"cannot write to {path}: {above.name} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunError(f"cannot write to {path}: no permission in {above.name or above}")


class RunDirectory:
    """Opens a directory for one run; a run that is there already is kept unless `overwrite` or `resume` is asked.

    With `resume`, a run that had not got as far as a configuration starts from the beginning.
    """

    def __init__(self, path: str | Path, config: dict[str, Any], *, overwrite: bool = False, resume: bool = False):
        check_directory(path, overwrite=overwrite, resume=resume)
        self.path = Path(path)
        json.dumps(config, allow_nan=False)  # what cannot be written must not cost the run that is there
        for name in ("checkpoint", "model"):
            recover_directory(self.path / name)
        if resume and self._has("config.json"):
            self._same_config(config)
            return
        for name in OURS:
            _remove(self.path / name)
        write_json(self.path / "config.json", config)

    def _same_config(self, config: dict[str, Any]) -> None:
        before, now = read_json(self.path / "config.json", "config"), json.loads(json.dumps(config))
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if changed:
            changes = "; ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed)
            raise RunError(f"{self.path}: the run to resume was started with other settings: {changes}")

    @property
    def finished(self) -> bool:
        return (self.path / "model" / "config.json").is_file()

    @property
    def status(self) -> str:
        """Why the finished run ended."""
        return read_json(self.path / "status.json", "status")["status"] if self._has("status.json") else "done"

    def read_log(self) -> list[dict[str, Any]]:
        """The log so far; a last line that was cut off by an interruption is dropped."""
        lines = (self.path / "log.jsonl").read_text(encoding="utf-8").splitlines() if self._has("log.jsonl") else []
        entries = []
        for line in lines:
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return entries

    def truncate_log(self, steps: int) -> list[dict[str, Any]]:
        """Keep the log's first `steps` entries: those that the checkpoint includes."""
        kept = self.read_log()[:steps]
        write_text(self.path / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in kept))
        return kept

    def append_log(self, entry: dict[str, Any]) -> None:
        try:
            with (self.path / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, allow_nan=False) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self.path / 'log.jsonl'}: {error.strerror or error}") from error

    def save_checkpoint(
        self,
        step: int,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
    ) -> None:
        """Weights, optimiser moments and step, in one atomic move."""
        with new_directory(self.path / "checkpoint") as directory:
            tensors = {f"{i}.weight": p.detach().contiguous() for i, p in enumerate(parameters)}
            for i, parameter in enumerate(parameters):
                moments = optimizer.state.get(parameter, {})
                tensors |= {f"{i}.{name}": value.contiguous() for name, value in moments.items()}
            try:
                save_file(tensors, directory / "state.safetensors")
            except SafetensorError as error:
                raise RunError(f"cannot write {self.path / 'checkpoint'}: {error}") from error
            write_json(directory / "state.json", {"step": step, **state})

    def load_checkpoint(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Put the checkpoint into parameters and optimiser; {"step": 0} if there is none yet."""
        if not self._has("checkpoint"):
            return {"step": 0}
        state = read_json(self.path / "checkpoint" / "state.json", "checkpoint")
        try:
            tensors = load_file(self.path / "checkpoint" / "state.safetensors")
        except (SafetensorError, OSError) as error:
            raise RunError(
                f"{self.path / 'checkpoint'}: not readable ({error}); start anew with --overwrite"
            ) from error
        for i, parameter in enumerate(parameters):
            own: dict[str, Tensor] = {
                key.split(".", 1)[1]: value for key, value in tensors.items() if key.startswith(f"{i}.")
            }
            with torch.no_grad():
                parameter.copy_(own.pop("weight"))
            if own:
                optimizer.state[parameter] = {name: _like(value, parameter) for name, value in own.items()}
        return state

    def drop_checkpoint(self) -> None:
        _remove(self.path / "checkpoint")

    def _has(self, name: str) -> bool:
        return (self.path / name).exists()


def _like(value: Tensor, parameter: nn.Parameter) -> Tensor:
    return value if value.ndim == 0 else value.to(parameter)  # the step count stays a float32 scalar


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
