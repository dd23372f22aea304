"""The main job, end to end: look at a model, choose heads, forget with those and with all heads, judge, report."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asu_interp.data import FactSet, load_facts
from asu_interp.evaluation.judge import Evaluation, check_facts, evaluate
from asu_interp.evidence import judge_run, write_evidence
from asu_interp.files import write_json
from asu_interp.heads import HeadSet
from asu_interp.lens.locality import classify_heads
from asu_interp.lens.patching import locate_heads
from asu_interp.lens.response import head_selectivity, temperature_response
from asu_interp.models import Model, load_model
from asu_interp.unlearning.run import check_directory
from asu_interp.unlearning.trainer import Record, unlearn

# Tuned on seed 0; the committed results are of other seeds.
N_HEADS, TAU = 80, 3.0
TAU_ALL = 2.5  # all heads at TAU babble; the published range is 2.0 to 2.8
TRAINING: dict[str, Any] = {
    "method": "asu-kl", "epochs": 14, "learning_rate": 3e-5, "retain_batch_size": 24, "neighbour_share": 2 / 3,
    "accumulation": 2,
}  # fmt: skip
TAUS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)

Say = Callable[[str], None]


def run_demo(
    out: Path,
    *,
    model_name: str = "smollm2-135m",
    data: str = "demo",
    seed: int = 0,
    n_heads: int = N_HEADS,
    tau: float = TAU,
    tau_all: float = TAU_ALL,
    max_pairs: int | None = 6,
    selectivity_facts: int | None = 3,
    judged_retain: int | None = 100,
    overwrite: bool = False,
    resume: bool = False,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Do it all and return the summary.

    `max_pairs` and `selectivity_facts` size the looking, `judged_retain` the facts to keep that are judged (all are
    trained on); None: all. `out` holds the head-selective run with the evidence, `out`/all-heads the run with all
    heads. Raises AsuError.
    """
    started = time.perf_counter()
    check_directory(out, overwrite=overwrite, resume=resume)
    model = load_model(model_name)
    facts = load_facts(data).known_to(model)
    facts.require("forget", "retain")
    check_facts(model, facts)
    say(f"{model_name} knows {len(facts.forget)} facts to forget and {len(facts.retain)} to keep")
    heads, files = look(model, facts, n_heads, max_pairs, selectivity_facts, say)
    say("judging the model as it is")
    judged_facts = facts.thinned(judged_retain) if judged_retain else facts
    before = evaluate(model, judged_facts)

    def forget(directory: Path, chosen: HeadSet | None, tau: float) -> tuple[Record, dict[str, Evaluation]]:
        """One run and its evidence; the trained model is let go, so that the next run has its memory."""
        say(f"forgetting with {n_heads if chosen else 'all'} heads at tau {tau}")
        run = unlearn(
            model, facts, tau=tau, heads=chosen, out=directory, overwrite=overwrite and directory.exists(),
            resume=resume, seed=seed, **TRAINING,
        )  # fmt: skip
        say("judging the trained model and its teacher")
        judged = judge_run(run, model, judged_facts, tau=tau, heads=chosen, before=before)
        write_evidence(directory, run.record, judged, seconds=time.perf_counter() - started)
        record = run.record
        del run
        gc.collect()  # a bridge refers to itself, so nothing else frees it
        return record, judged

    record, evaluations = forget(out, heads, tau)
    for file, content in files.items():
        write_json(out / file, content)
    _, other = forget(out / "all-heads", None, tau_all)
    evaluations |= {"all_heads": other["after"], "all_heads_teacher": other["teacher"]}
    return write_evidence(out, record, evaluations, seconds=time.perf_counter() - started)


def look(
    model: Model, facts: FactSet, n_heads: int, max_pairs: int | None, selectivity_facts: int | None, say: Say
) -> tuple[HeadSet, dict[str, Any]]:
    """Everything that is seen before training: the chosen heads, and the content of the files that show them."""
    say("looking: head classes, activation patching, one head smoothed at a time, the temperature response")
    classes = classify_heads(model, facts.retain)
    located = locate_heads(model, facts.forget, max_pairs=max_pairs)
    selectivity = head_selectivity(model, facts.forget[:selectivity_facts])
    heads = selectivity.top(n_heads)
    return heads, {
        "heads.json": classes.to_dict() | {"chosen": heads.to_dict()},
        "locate.json": located.to_dict(),
        "selectivity.json": selectivity.to_dict(),
        "response.json": temperature_response(model, facts.forget, TAUS, heads=heads).to_dict(),
        "response-all-heads.json": temperature_response(model, facts.forget, TAUS).to_dict(),
    }
