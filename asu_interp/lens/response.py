"""What temperature does to factual and functional tokens (arXiv 2603.01285)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from asu_interp.data.batches import Encoded, batches, encode_facts
from asu_interp.data.facts import Fact
from asu_interp.errors import TemperatureError
from asu_interp.heads import HeadSet
from asu_interp.intervals import Mean, bootstrap_mean
from asu_interp.lens.attention import attention_entropy
from asu_interp.lens.branching import Branch, branched_logits
from asu_interp.lens.temperature import smoothed, temperature_table
from asu_interp.lens.tokens import Span, classify_answer
from asu_interp.models import Model
from asu_interp.models.seams import temperature_hooks

FACTUAL_LOST, FUNCTIONAL_LOST = (
    0.5,
    0.1,
)  # the claim: at least so many factual, at most so many functional tokens
Rule = Callable[[str], Sequence[Span]]


class TokenScores(NamedTuple):
    """Per answer token, fact by fact: how the model likes it."""

    nll: Float[Tensor, "token"]  # nats
    margin: Float[Tensor, "token"]  # logits: z[y] - max of the others; negative: greedy decoding loses the token


def token_scores(logits: Float[Tensor, "... vocab"], targets: Int[Tensor, "..."]) -> TokenScores:
    """NLL and logit margin of the target tokens."""
    target = logits.gather(-1, targets[..., None])[..., 0]
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    others = torch.where(target == best, second, best)  # a tie leaves margin 0
    return TokenScores(logits.logsumexp(-1) - target, target - others)


def score_facts(model: Model, facts: Sequence[Fact], *, batch_size: int = 16) -> TokenScores:
    """Scores of all answer tokens, in the order of the facts and their tokens."""
    return score_encoded(model, encode_facts(model, facts), batch_size)


def score_encoded(model: Model, encoded: Sequence[Encoded], batch_size: int = 16) -> TokenScores:
    """As `score_facts`, for sequences that are already encoded."""
    parts: dict[int, TokenScores] = {}
    with model.evaluating():
        for batch in batches(encoded, model.pad_token, batch_size):
            scores = token_scores(model.answer_logits(batch).float(), batch.targets.to(model.device))
            lengths = batch.answer.sum(dim=1).tolist()
            for i, nll, margin in zip(batch.index.tolist(), *(x.cpu().split(lengths) for x in scores), strict=True):
                parts[i] = TokenScores(nll, margin)
    ordered = [parts[i] for i in range(len(encoded))]
    return TokenScores(*(torch.cat([getattr(p, name) for p in ordered]) for name in TokenScores._fields))


class TokenClasses(NamedTuple):
    """Per answer token: whether it is factual, and which fact it belongs to."""

    factual: Bool[Tensor, "token"]
    fact: Int[Tensor, "token"]


def classify_tokens(model: Model, facts: Sequence[Fact], rule: Rule | None = None) -> TokenClasses:
    """Factual or functional, for every answer token: by each fact's marked spans, else by `rule`, else by default."""
    factual, index = [], []
    for i, (fact, encoded) in enumerate(zip(facts, encode_facts(model, facts), strict=True)):
        classes = classify_answer(model.tokenizer, fact.answer, encoded.answer, spans=fact.spans, rule=rule)
        factual += classes
        index += [i] * len(classes)
    return TokenClasses(torch.tensor(factual, dtype=torch.bool), torch.tensor(index))


@dataclass(frozen=True)
class TemperatureResponse:
    """NLL (nats), margin (logits) of every answer token and entropy (nats) of every head, at each temperature."""

    taus: tuple[float, ...]
    heads: str
    nll: Float[Tensor, "tau token"]
    margin: Float[Tensor, "tau token"]
    entropy: Float[Tensor, "tau layer head"]
    factual: Bool[Tensor, "token"]
    fact: Int[Tensor, "token"]
    untouched: TokenScores  # at tau = 1
    seed: int = 0

    @cached_property
    def by_class(self) -> dict[str, dict[str, list[Mean]]]:
        """class -> quantity -> one Mean per tau; quantities: nll, nll_change, margin, margin_change, lost.

        Intervals resample facts. `lost` is the share of tokens whose margin is positive at tau = 1 and negative here.
        """
        quantities = {
            "nll": self.nll,
            "nll_change": self.nll - self.untouched.nll,
            "margin": self.margin,
            "margin_change": self.margin - self.untouched.margin,
            "lost": (self.margin < 0).float(),
        }
        held = self.untouched.margin > 0  # only what greedy decoding says at tau = 1 can be lost

        def means(quantity: str, chosen: Tensor) -> list[Mean]:
            if quantity == "lost":
                chosen = chosen & held
            fact = self.fact[chosen].numpy()
            return [bootstrap_mean(row[chosen].numpy(), fact, seed=self.seed) for row in quantities[quantity]]

        return {
            name: {quantity: means(quantity, chosen) for quantity in quantities}
            for name, chosen in (("factual", self.factual), ("functional", ~self.factual))
        }

    @property
    def interval(self) -> tuple[float, float] | None:
        """The smallest and largest tau at which >= 50 % of factual and <= 10 % of functional tokens are lost.

        None if there is no such tau: then the claim does not hold for this model, heads and facts.
        """
        lost = {name: [m.mean for m in self.by_class[name]["lost"]] for name in ("factual", "functional")}
        good = [
            tau
            for tau, factual, functional in zip(self.taus, lost["factual"], lost["functional"], strict=True)
            if factual >= FACTUAL_LOST and functional <= FUNCTIONAL_LOST
        ]
        return (min(good), max(good)) if good else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "taus": list(self.taus),
            "heads": self.heads,
            "n_factual": int(self.factual.sum()),
            "n_functional": int((~self.factual).sum()),
            "interval": list(self.interval) if self.interval else None,
            "by_class": {
                name: {q: [m.to_dict() for m in means] for q, means in quantities.items()}
                for name, quantities in self.by_class.items()
            },
            "entropy": self.entropy.tolist(),
        }


@dataclass(frozen=True)
class HeadSelectivity:
    """Rise of factual and functional NLL (nats) with one head alone smoothed, for every head."""

    tau: float
    factual: Float[Tensor, "layer head"]
    functional: Float[Tensor, "layer head"]
    n_factual: int
    n_functional: int

    @property
    def selectivity(self) -> Float[Tensor, "layer head"]:
        """Factual minus functional: high where a head hits facts and spares the rest."""
        return self.factual - self.functional

    def top(self, k: int) -> HeadSet:
        return HeadSet.top(self.selectivity, k, f"top {k} by selectivity at tau {self.tau}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "tau": self.tau,
            "n_factual": self.n_factual,
            "n_functional": self.n_functional,
            "nll_change_factual": self.factual.tolist(),
            "nll_change_functional": self.functional.tolist(),
            "selectivity": self.selectivity.tolist(),
        }


def temperature_response(
    model: Model,
    facts: Sequence[Fact],
    taus: Sequence[float],
    *,
    heads: HeadSet | None = None,
    rule: Rule | None = None,
    batch_size: int = 16,
    seed: int = 0,
) -> TemperatureResponse:
    """Score the answers with the chosen heads (None: all) at each temperature of the grid.

    Raises TemperatureError for a bad or empty grid, FactsError for facts that do not fit the model.
    """
    if not taus:
        raise TemperatureError("no temperatures given")
    classes = classify_tokens(model, facts, rule)
    untouched = score_facts(model, facts, batch_size=batch_size)
    nll, margin, entropy = [], [], []
    for tau in taus:
        with smoothed(model, tau, heads):
            scores = score_facts(model, facts, batch_size=batch_size)
            nll.append(scores.nll)
            margin.append(scores.margin)
            entropy.append(attention_entropy(model, facts, batch_size=batch_size))
    return TemperatureResponse(
        tuple(float(tau) for tau in taus),
        str(heads) if heads is not None else "all",
        torch.stack(nll),
        torch.stack(margin),
        torch.stack(entropy),
        *classes,
        untouched,
        seed,
    )


def head_selectivity(
    model: Model, facts: Sequence[Fact], tau: float = 4.0, *, rule: Rule | None = None, max_rows: int = 128
) -> HeadSelectivity:
    """Smooth one head at a time, every head in turn: which hit factual tokens and spare functional ones?

    Raises TemperatureError, ModelError, FactsError.
    """
    classes = classify_tokens(model, facts, rule)
    branches = [_smooth_each_head(model, layer, tau) for layer in range(model.n_layers)]
    changes = []
    for encoded in encode_facts(model, facts):
        tokens = torch.tensor(encoded.prompt + encoded.answer)
        reads = range(len(encoded.prompt) - 1, len(tokens) - 1)
        targets = torch.tensor(encoded.answer, device=model.device)
        base = score_encoded(model, [encoded]).nll
        nll = [
            token_scores(rows.float(), targets.expand(len(rows), -1)).nll.cpu()
            for rows in branched_logits(model, tokens, branches, list(reads), max_rows=max_rows)
        ]
        changes.append(torch.stack(nll) - base)
    change: Float[Tensor, "layer head token"] = torch.cat(changes, dim=-1)
    factual, functional = change[..., classes.factual], change[..., ~classes.factual]
    return HeadSelectivity(float(tau), factual.mean(-1), functional.mean(-1), factual.shape[-1], functional.shape[-1])


def _smooth_each_head(model: Model, layer: int, tau: float) -> Branch:
    """Copy h has tau in head h of the layer, and 1 elsewhere."""
    table = torch.ones(model.n_heads, model.n_layers, model.n_heads, device=model.device)
    table[range(model.n_heads), layer, range(model.n_heads)] = tau
    hooks = temperature_hooks(model.bridge, temperature_table(model, table), model.seam)
    edits = tuple((name.removeprefix(f"blocks.{layer}.attn."), partial(fn, hook=None)) for name, fn in hooks)
    return Branch(layer, model.n_heads, edits)
