"""The fine-tuning loop: forget and retain samples side by side, until the steps are done or a limit is met."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from asu_interp.data.batches import Batch, Encoded, encode_facts, make_batch
from asu_interp.data.facts import FactSet
from asu_interp.errors import RunError
from asu_interp.files import write_json
from asu_interp.heads import HeadSet
from asu_interp.lens.temperature import Tau, temperature_table
from asu_interp.models import Model, load_model
from asu_interp.unlearning.adapters import adapters_off, add_adapters, merge_adapters
from asu_interp.unlearning.objectives import Losses, Scored, Step, find_method
from asu_interp.unlearning.run import RunDirectory
from asu_interp.unlearning.teacher import Targets, frozen_logits

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """Everything that decides how a run goes. Raises RunError for values that make no sense.

    One epoch goes once through the forget set in random order; each forget batch meets a retain batch, its share of
    neighbours and of other facts drawn without replacement until they are used up. Loss: forget_weight * L_f + L_r,
    both means over samples.
    """

    method: str = "asu-kl"
    epochs: int = 20
    batch_size: int = 16
    retain_batch_size: int = 16
    neighbour_share: float = 0.5  # share of a retain batch that is drawn from the neighbours: they are most at risk
    learning_rate: float = 2e-5
    warmup: float = 0.1  # share of the steps over which the learning rate rises from 0
    weight_decay: float = 0.0
    clip: float = 1.0  # largest gradient norm
    accumulation: int = 1  # pieces that a batch is cut into, to save memory
    forget_weight: float = 1.0  # lambda
    lora_rank: int | None = None  # None: all weights are trained
    stop_forget_nll: float | None = None  # stop when an epoch's mean forget NLL reaches it (nats per token)
    stop_retain_rise: float | None = None  # stop when the retain NLL has risen by it (nats per token)
    checkpoint_every: int = 20  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        find_method(self.method)
        for name in ("epochs", "batch_size", "retain_batch_size", "accumulation", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise RunError(f"{name} = {getattr(self, name)}: at least 1")
        for name in ("learning_rate", "clip", "forget_weight"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise RunError(f"{name} = {getattr(self, name)}: finite and greater than 0")
        for name in ("stop_forget_nll", "stop_retain_rise", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise RunError(f"{name} = {value}: finite and not negative")
        if self.lora_rank is not None and self.lora_rank < 1:
            raise RunError(f"LoRA rank {self.lora_rank}: a whole number of at least 1")
        for name in ("warmup", "neighbour_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise RunError(f"{name} = {getattr(self, name)}: a share, 0 to 1")


@dataclass(frozen=True)
class Record:
    """What is known of a finished run: its settings, the log of its steps, and why it ended."""

    config: dict[str, Any]
    log: list[dict[str, Any]]
    status: str


@dataclass(frozen=True)
class Run:
    """A finished run: the trained model and the record."""

    model: Model
    record: Record

    @property
    def log(self) -> list[dict[str, Any]]:
        return self.record.log

    @property
    def status(self) -> str:
        return self.record.status


def unlearn(
    model: Model,
    facts: FactSet,
    *,
    tau: Tau = 2.5,
    heads: HeadSet | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = True,
    **training: Any,
) -> Run:
    """Train a copy of the model to forget `facts.forget` and keep `facts.retain`; `model` stays as it is.

    The forget-teacher is `model` with temperature `tau` on `heads` (None: all). Further keywords: see `Training`.
    With `out`, the run's files are written there, and `resume` continues an interrupted run to the same result.
    Raises RunError, FactsError, TemperatureError, HeadError before anything is written; a loss that is not finite
    raises RunError and leaves the last good state as checkpoint.
    """
    settings = Training(**training)
    facts.require("forget", "retain")
    table = temperature_table(model, tau, heads).detach()
    model.seam  # noqa: B018  raises if attention cannot be smoothed
    encoded = encode_facts(model, facts.forget), encode_facts(model, facts.retain)
    config = {
        "model": model.name,
        "fingerprint": model.fingerprint(),
        "template": model.template.name,
        "dtype": str(model.hf.dtype).removeprefix("torch."),
        "data": facts.name,
        "known": facts.known,
        "facts": facts.fingerprint(),
        "n_forget": len(facts.forget),
        "n_retain": len(facts.retain),
        "heads": str(heads) if heads is not None else "all",
        "heads_origin": heads.origin if heads is not None else "all",
        "tau": float(tau) if not isinstance(tau, Tensor) else table.tolist(),
        **asdict(settings),
    }
    directory = RunDirectory(out, config, overwrite=overwrite, resume=resume) if out is not None else None
    if directory is not None and resume and directory.finished:
        directory.drop_checkpoint()
        trained = load_model(
            directory.path / "model", dtype=model.hf.dtype, device=model.device, template=model.template.name
        )
        return Run(trained, Record(config, directory.read_log(), directory.status))
    plan = schedule(len(facts.forget), [fact.neighbour for fact in facts.retain], settings)
    trainer = _Trainer(model, table, encoded, plan, settings, directory)
    status = trainer.train(progress)
    if directory is not None:
        write_json(directory.path / "status.json", {"status": status})
        trainer.student.save(directory.path / "model")
        directory.drop_checkpoint()
    return Run(trainer.student, Record(config, trainer.log, status))


class _Trainer:
    """The student, its frozen targets and its optimiser; `train` goes through the schedule."""

    def __init__(
        self,
        model: Model,
        tau: Tensor,
        encoded: tuple[list[Encoded], list[Encoded]],
        plan: list[tuple[list[int], list[int]]],
        settings: Training,
        directory: RunDirectory | None,
    ):
        self.settings, self.directory, self.plan = settings, directory, plan
        self.forget, self.retain = encoded
        self.loss = find_method(settings.method).loss
        self.student = model.copy()
        self.pad = model.pad_token
        if settings.lora_rank is None:
            self.parameters = _live_parameters(self.student)
            teacher, off = model, nullcontext
        else:
            self.parameters = add_adapters(self.student, settings.lora_rank, seed=settings.seed)
            teacher, off = self.student, lambda: adapters_off(self.student)  # type: ignore[assignment]
        self.teacher = Targets(_within(off, frozen_logits(teacher, tau)), self.forget, self.pad)
        self.reference = Targets(_within(off, frozen_logits(teacher)), self.retain, self.pad)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        self.log: list[dict[str, Any]] = []

    def train(self, progress: bool) -> str:
        """Go through the schedule; returns why training ended."""
        plan = self.plan
        status, done = self._restore()
        per_epoch = math.ceil(len(self.forget) / self.settings.batch_size)
        with _progress(len(plan), done, progress) as show:
            for step in range(done, len(plan) if status is None else done):
                self.log.append(self._step(step, len(plan), *plan[step]))
                if self.directory:
                    self.directory.append_log(self.log[-1])
                show(self.log[-1])
                status = self._limit(per_epoch) if (step + 1) % per_epoch == 0 else None
                if self.directory and ((step + 1) % self.settings.checkpoint_every == 0 or status):
                    self._checkpoint(status)
                if status:
                    break
        self.optimizer.zero_grad(set_to_none=True)  # gradients would stay with the model for good
        if self.settings.lora_rank is not None:
            merge_adapters(self.student)
        return status or "done"

    def _step(self, step: int, total: int, forget: list[int], retain: list[int]) -> dict[str, Any]:
        started = time.perf_counter()
        rate = self.settings.learning_rate * min(1.0, (step + 1) / max(1, round(self.settings.warmup * total)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        sums = dict.fromkeys(("loss", "forget_loss", "retain_loss", "forget_nll", "retain_nll"), 0.0)
        for piece, weights in _pieces(forget, retain, self.settings.accumulation):
            scored = self._score(*piece)
            losses = self.loss(scored)
            loss = weights[0] * self.settings.forget_weight * losses.forget + weights[1] * losses.retain
            self._check(float(loss.detach()), step, "loss")
            loss.backward()
            for name, value in _values(scored, losses, loss, weights).items():
                sums[name] += value
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.settings.clip))
        self._check(norm, step, "gradient")
        self.optimizer.step()
        return {
            "step": step + 1, **sums, "gradient_norm": norm, "learning_rate": rate,
            "seconds": round(time.perf_counter() - started, 3),
        }  # fmt: skip

    def _score(self, forget: list[int], retain: list[int]) -> Step:
        """Both sets in one forward pass, so that the matrix products are large."""
        batch = make_batch([*(self.forget[i] for i in forget), *(self.retain[i] for i in retain)], self.pad)
        logits = self.student.answer_logits(batch)
        n = int(batch.answer[: len(forget)].sum())
        return Step(
            Scored(_rows(batch, slice(0, len(forget))), logits[:n]),
            Scored(_rows(batch, slice(len(forget), None)), logits[n:]),
            teacher=lambda: self.teacher(forget),
            reference=lambda: self.reference(retain),
        )

    def _check(self, value: float, step: int, what: str) -> None:
        """Before the weights are touched: what is not finite must not reach them."""
        if math.isfinite(value):
            return
        kept = ""
        if self.directory:
            self._checkpoint(None)
            kept = f"; the weights before this step are kept in {self.directory.path / 'checkpoint'}"
        raise RunError(f"step {step + 1}: the {what} is {value}; try a lower learning rate{kept}")

    def _limit(self, per_epoch: int) -> str | None:
        epoch = self.log[-per_epoch:]
        forget = sum(entry["forget_nll"] for entry in epoch) / len(epoch)
        rise = sum(entry["retain_nll"] for entry in epoch) / len(epoch) - self.log[0]["retain_nll"]
        if self.settings.stop_forget_nll is not None and forget >= self.settings.stop_forget_nll:
            return f"forget NLL {forget:.2f} reached its target"
        if self.settings.stop_retain_rise is not None and rise >= self.settings.stop_retain_rise:
            return f"retain NLL rose by {rise:.2f}"
        return None

    def _checkpoint(self, status: str | None) -> None:
        assert self.directory is not None
        self.directory.save_checkpoint(len(self.log), self.parameters, self.optimizer, {"status": status})

    def _restore(self) -> tuple[str | None, int]:
        if self.directory is None:
            return None, 0
        state = self.directory.load_checkpoint(self.parameters, self.optimizer)
        self.log = self.directory.truncate_log(state["step"])
        return state.get("status"), state["step"]


def schedule(n_forget: int, neighbour: Sequence[bool], settings: Training) -> list[tuple[list[int], list[int]]]:
    """The samples of every step, from the seed alone, so that a resumed run meets the same ones.

    `neighbour[i]` says whether retain sample i is one; where one kind is missing, the other fills the batch.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    near = [i for i, is_near in enumerate(neighbour) if is_near]
    far = [i for i, is_near in enumerate(neighbour) if not is_near]
    size = min(settings.retain_batch_size, len(neighbour))
    n_near = round(settings.neighbour_share * size) if far else size
    n_near = min(n_near, len(near)) if near else 0
    streams = (_endless(near, generator), n_near), (_endless(far, generator), min(size - n_near, len(far)))
    plan = []
    for _ in range(settings.epochs):
        order = torch.randperm(n_forget, generator=generator).tolist()
        for start in range(0, n_forget, settings.batch_size):
            retain = [next(stream) for stream, n in streams for _ in range(n)]
            plan.append((order[start : start + settings.batch_size], retain))
    return plan


def _endless(samples: list[int], generator: torch.Generator) -> Iterator[int]:
    while True:
        yield from (samples[i] for i in torch.randperm(len(samples), generator=generator).tolist())


def _pieces(
    forget: list[int], retain: list[int], n: int
) -> Iterator[tuple[tuple[list[int], list[int]], tuple[float, float]]]:
    """Cut a step's samples into n pieces, each with its share of the forget and of the retain mean."""
    n = min(n, len(forget), len(retain))
    for i in range(n):
        piece = forget[i::n], retain[i::n]
        yield piece, (len(piece[0]) / len(forget), len(piece[1]) / len(retain))


@torch.no_grad()
def _values(step: Step, losses: Losses, loss: Tensor, weights: tuple[float, float]) -> dict[str, float]:
    return {
        "loss": float(loss),
        "forget_loss": weights[0] * float(losses.forget),
        "retain_loss": weights[1] * float(losses.retain),
        "forget_nll": weights[0] * float(step.forget.nll),
        "retain_nll": weights[1] * float(step.retain.nll),
    }


def _rows(batch: Batch, rows: slice) -> Batch:
    return replace(
        batch,
        **{name: getattr(batch, name)[rows] for name in ("tokens", "attention_mask", "answer", "index")},
    )


def _live_parameters(model: Model) -> list[nn.Parameter]:
    """Every parameter that the forward pass uses; stale fused copies get no gradient and are left alone."""
    parameters = [p for p in dict.fromkeys(model.bridge.parameters()) if p.is_floating_point()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    return parameters


def _within(context: Any, logits: Any) -> Any:
    def inside(batch: Batch) -> Tensor:
        with context():
            return logits(batch)

    return inside


@contextmanager
def _progress(total: int, done: int, visible: bool) -> Iterator[Any]:
    columns: Sequence[Any] = (
        TextColumn("unlearning"), BarColumn(), MofNCompleteColumn(),
        TextColumn("forget {task.fields[forget]:.3f}  retain {task.fields[retain]:.3f}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bar:
        task = bar.add_task("unlearning", total=total, completed=done, forget=math.nan, retain=math.nan)

        def show(entry: dict[str, Any]) -> None:
            bar.update(task, advance=1, forget=entry["forget_loss"], retain=entry["retain_loss"])

        yield show
