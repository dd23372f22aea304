"""The evidence of a run: the model before, its forget-teacher, and the model after; written beside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asu_interp.data import FactSet
from asu_interp.evaluation.judge import Evaluation, evaluate
from asu_interp.evaluation.summary import metrics_of, peak_rss_mb
from asu_interp.files import write_json
from asu_interp.heads import HeadSet
from asu_interp.lens.temperature import Tau
from asu_interp.models import Model
from asu_interp.report.page import write_report
from asu_interp.unlearning.trainer import Record, Run

TEACHER_RETAIN = 40  # facts to keep on which the teacher is judged: it is a means, and slow to judge in full


def judge_run(
    run: Run, model: Model, facts: FactSet, *, tau: Tau, heads: HeadSet | None, before: Evaluation
) -> dict[str, Evaluation]:
    """Evaluations of the trained model ("after") and of the teacher it learned from, beside "before"."""
    return {
        "before": before,
        "teacher": evaluate(model, facts.thinned(TEACHER_RETAIN), tau=tau, heads=heads, baseline=before),
        "after": evaluate(run.model, facts, baseline=before, judge=model),
    }


def write_evidence(
    directory: Path,
    record: Record,
    evaluations: dict[str, Evaluation],
    *,
    seconds: float,
) -> dict[str, Any]:
    """Write evaluation.json, summary.json and report.html; returns the summary.

    `evaluations` beyond before, teacher and after (such as "all_heads") enter the metrics under their names.
    """
    write_json(directory / "evaluation.json", {name: e.to_dict() for name, e in evaluations.items()})
    metrics: dict[str, float] = {}
    unavailable: dict[str, str] = {}
    for name, evaluation in evaluations.items():
        if name == "before":
            continue
        prefix = "" if name == "after" else f"{name}_"
        found, missing = metrics_of(evaluations["before"], evaluation, prefix)
        metrics, unavailable = metrics | found, unavailable | missing
    metrics |= {
        "heads_selected": float(len(HeadSet.parse(record.config["heads"], evaluations["before"]))),
        "steps": float(len(record.log)),
        "wall_seconds": seconds,
        "peak_rss_mb": peak_rss_mb(),
    }
    described = {key: record.config[key] for key in ("model", "data", "method", "heads_origin", "seed")}
    result = {"status": record.status, **described, "metrics": metrics, "unavailable": unavailable}
    write_json(directory / "summary.json", result)
    write_report(directory)
    return result
