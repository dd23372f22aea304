"""What a model still knows and what it says: recall, scores by token class, coherence, neutral text, attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asu_interp.data.batches import encode_facts, encode_texts
from asu_interp.data.facts import Fact, FactSet, recall_texts
from asu_interp.evaluation.coherence import Coherence, coherence, perplexity
from asu_interp.heads import HeadSet
from asu_interp.intervals import Mean, bootstrap_mean
from asu_interp.lens.attention import attention_entropy
from asu_interp.lens.response import Rule, TokenClasses, TokenScores, classify_tokens, score_facts
from asu_interp.lens.temperature import Tau, smoothed
from asu_interp.models import Model


@dataclass(frozen=True)
class SetScores:
    """One set of facts, fact by fact and token by token, as the model has them."""

    facts: tuple[Fact, ...]
    said: tuple[str, ...]  # greedy continuation of prompt and stem
    recalled: Bool[Tensor, "fact"]
    paraphrases_recalled: Bool[Tensor, "paraphrase"]
    paraphrase_fact: tuple[int, ...]  # the fact that each paraphrase belongs to
    tokens: TokenScores
    classes: TokenClasses
    token_texts: tuple[tuple[str, ...], ...]  # each fact's answer tokens as text
    coherence: Coherence | None = None

    @property
    def recall(self) -> Mean:
        """Share of facts whose target is said, on the prompts as asked."""
        return bootstrap_mean(self.recalled.float().numpy())

    @property
    def recall_paraphrased(self) -> Mean:
        """Share of paraphrased prompts that the target continues; facts are resampled."""
        return bootstrap_mean(self.paraphrases_recalled.float().numpy(), list(self.paraphrase_fact))

    def by_class(self, quantity: str) -> dict[str, Mean]:
        """Mean `nll` (nats) or `margin` (logits) of factual and functional answer tokens."""
        values = getattr(self.tokens, quantity)
        chosen = {"factual": self.classes.factual, "functional": ~self.classes.factual}
        return {
            name: bootstrap_mean(values[mask].numpy(), self.classes.fact[mask].numpy()) for name, mask in chosen.items()
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "n_facts": len(self.facts),
            "recall": self.recall.to_dict(),
            "recall_paraphrased": self.recall_paraphrased.to_dict(),
            "nll": {name: mean.to_dict() for name, mean in self.by_class("nll").items()},
            "margin": {name: mean.to_dict() for name, mean in self.by_class("margin").items()},
            "coherence": self.coherence.to_dict() if self.coherence else None,
            "facts": [self._fact_to_dict(i) for i in range(len(self.facts))],
        }

    def _fact_to_dict(self, i: int) -> dict[str, Any]:
        fact, own = self.facts[i], self.classes.fact == i
        return {
            "prompt": fact.prompt,
            "stem": fact.stem,
            "target": fact.target,
            "said": self.said[i],
            "recalled": bool(self.recalled[i]),
            "tokens": list(self.token_texts[i]),
            "factual": self.classes.factual[own].tolist(),
            "nll": self.tokens.nll[own].tolist(),
            "margin": self.tokens.margin[own].tolist(),
        }


@dataclass(frozen=True)
class Evaluation:
    """All sets of a FactSet (`forget`, `neighbours`, `retain` without neighbours), neutral text and attention."""

    model: str
    sets: dict[str, SetScores]
    neutral_perplexity: float | None
    entropy: Float[Tensor, "layer head"]  # nats, over the forget set's answers
    baseline: Evaluation | None = None

    @property
    def n_layers(self) -> int:
        return self.entropy.shape[0]

    @property
    def n_heads(self) -> int:
        return self.entropy.shape[1]

    def ratio(self, set_name: str) -> float | None:
        """Recall of a set relative to the baseline's; None without a baseline or where it knew nothing."""
        if self.baseline is None or set_name not in self.sets:
            return None
        before = self.baseline.sets[set_name].recall.mean
        return self.sets[set_name].recall.mean / before if before > 0 else None

    @property
    def perplexity_ratio(self) -> float | None:
        """Perplexity of the neutral text relative to the baseline's."""
        before = self.baseline.neutral_perplexity if self.baseline else None
        return self.neutral_perplexity / before if self.neutral_perplexity and before else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "sets": {name: scores.to_dict() for name, scores in self.sets.items()},
            "neutral_perplexity": self.neutral_perplexity,
            "neutral_perplexity_ratio": self.perplexity_ratio,
            "recall_ratio": {name: self.ratio(name) for name in self.sets},
            "attention_entropy": self.entropy.tolist(),
        }


def evaluate(
    model: Model,
    facts: FactSet,
    *,
    tau: Tau | None = None,
    heads: HeadSet | None = None,
    baseline: Model | Evaluation | None = None,
    judge: Model | None = None,
    rule: Rule | None = None,
    max_new_tokens: int = 12,
) -> Evaluation:
    """Evaluate a model on all sets of `facts`; with `tau`, its forget-teacher (smoothed on `heads`, None: all).

    `judge` gives the perplexity of what is said: the original model (default: the baseline, else the model itself).
    Raises FactsError if the forget set is empty, TemperatureError, HeadError.
    """
    facts.require("forget")
    if isinstance(baseline, Model):
        judge = judge or baseline
        baseline = evaluate(baseline, facts, rule=rule, max_new_tokens=max_new_tokens)
    sets = {
        "forget": facts.forget,
        "neighbours": facts.neighbours,
        "retain": tuple(fact for fact in facts.retain if not fact.neighbour),
    }
    with smoothed(model, tau, heads) if tau is not None else nullcontext():
        scores = {name: _score_set(model, chosen, rule, max_new_tokens) for name, chosen in sets.items() if chosen}
        neutral = perplexity(model, facts.neutral) if facts.neutral else None
        entropy = attention_entropy(model, facts.forget)
    # outside the smoothing, so that the judge is the model as it is
    judged = {name: replace(each, coherence=_judge(judge or model, each)) for name, each in scores.items()}
    return Evaluation(model.name, judged, neutral, entropy, baseline)


def check_facts(model: Model, facts: FactSet) -> None:
    """Raise FactsError for a prompt, paraphrase or neutral text that the model cannot read, before it is trained."""
    for fact in facts.forget + facts.retain:
        for prompt in (fact.prompt, *fact.paraphrases):
            model.encode_cue(prompt, fact.stem if prompt == fact.prompt else "")
    encode_texts(model, facts.neutral)


def _score_set(model: Model, facts: Sequence[Fact], rule: Rule | None, max_new_tokens: int) -> SetScores:
    said = recall_texts(model, facts, max_new_tokens)
    prompts = [(i, text) for i, fact in enumerate(facts) for text in fact.paraphrases]
    answers = model.generate([text for _, text in prompts], max_new_tokens=max_new_tokens)
    return SetScores(
        facts=tuple(facts),
        said=tuple(said),
        recalled=torch.tensor([fact.recalled_in(text) for fact, text in zip(facts, said, strict=True)]),
        paraphrases_recalled=torch.tensor(
            [facts[i].recalled_in(text) for (i, _), text in zip(prompts, answers, strict=True)],
            dtype=torch.bool,
        ),
        paraphrase_fact=tuple(i for i, _ in prompts),
        tokens=score_facts(model, facts),
        classes=classify_tokens(model, facts, rule),
        token_texts=tuple(
            tuple(model.tokenizer.decode([token]) for token in encoded.answer) for encoded in encode_facts(model, facts)
        ),
    )


def _judge(judge: Model, scores: SetScores) -> Coherence:
    return coherence(judge, [f.prompt for f in scores.facts], [f.stem for f in scores.facts], scores.said)
