"""summary.json: the numbers of a run, flat, and what could not be had with its reason."""

from __future__ import annotations

import math
import resource
import sys

from asu_interp.evaluation.judge import Evaluation

# the sets as files name them
NAMES = {"forget": "forget", "retain": "retain", "neighbours": "neighbour"}


def metrics_of(before: Evaluation, after: Evaluation, prefix: str = "") -> tuple[dict[str, float], dict[str, str]]:
    """Numbers of a trained model beside those of the original: (metrics, name -> why it is unavailable)."""
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for set_name, name in NAMES.items():
        for when, evaluation in (("before", before), ("after", after)):
            scores = evaluation.sets.get(set_name)
            recall = f"{prefix}{name}_recall_{when}"
            if scores is None:
                reasons[recall] = reasons[f"{recall}_paraphrased"] = f"there are no facts in the {set_name} set"
                continue
            values[recall] = scores.recall.mean
            values[f"{recall}_paraphrased"] = scores.recall_paraphrased.mean
            reasons[f"{recall}_paraphrased"] = f"no fact of the {set_name} set has a paraphrase"
            for kind, nll in scores.by_class("nll").items():
                values[f"{prefix}{name}_nll_{kind}_{when}"] = nll.mean
                reasons[f"{prefix}{name}_nll_{kind}_{when}"] = f"no {kind} tokens in the {set_name} set"
            if set_name == "forget" and scores.coherence is not None:
                judged = f"{prefix}forget_coherence_perplexity_{when}"
                values[judged] = scores.coherence.perplexity
                reasons[judged] = "everything said was empty"
                values[f"{prefix}forget_repeated_trigrams_{when}"] = scores.coherence.repeated_trigrams
    values[f"{prefix}neutral_perplexity_ratio"] = after.perplexity_ratio
    reasons[f"{prefix}neutral_perplexity_ratio"] = "no neutral sentences, or no baseline"
    metrics = {key: value for key, value in values.items() if value is not None and math.isfinite(value)}
    return metrics, {key: why for key, why in reasons.items() if key not in metrics}


def peak_rss_mb() -> float:
    """Largest memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 if sys.platform != "darwin" else 1024**2)
