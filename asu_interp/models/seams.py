"""Where a head's attention can be edited, and the proof that an edit there takes effect.

Attention with temperature is A = softmax(S / tau), S the full pre-softmax logits (arXiv 2603.01285). There are two
places ("seams") to divide by tau:

- SCORES: at `hook_attn_scores`, on S itself, masked entries left alone. The definition, and the default.
- QUERY: at `hook_q`, before the product with the keys. The same where S = q.k * scale + mask, and the only way
  where TransformerLens' `hook_attn_scores` fires after the fact (OPT, GPT-J, GPT-Neo).

Nothing is smoothed unverified: `find_seam` tries both on the model at hand, layer by layer, and takes the first
that turns every layer's pattern into exactly the one that the definition asks for and moves the logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from asu_interp.errors import ModelError

Hook = tuple[str, Callable[..., Any]]


class Seam(Enum):
    SCORES = "scores"
    QUERY = "query"


def temperature_hooks(bridge: TransformerBridge, tau: Float[Tensor, "... layer head"], seam: Seam) -> list[Hook]:
    """Hooks that divide by tau; a leading [row] axis gives each row of the batch its own table.

    Layers whose tau is 1 throughout get no hook, so they stay bit-identical.
    """
    hooks: list[Hook] = []
    for layer in range(tau.shape[-2]):
        tau_layer = tau[..., layer, :]
        if not tau_layer.requires_grad and bool((tau_layer == 1).all()):
            continue
        attention = bridge.blocks[layer].attn
        name = f"blocks.{layer}.attn"
        if seam is Seam.QUERY:
            hooks.append((f"{name}.hook_q", _divide_query(tau_layer)))
        elif (sinks := learned_sinks(attention)) is not None:
            hooks += _divide_with_sinks(name, tau_layer, sinks)
        else:
            hooks.append((f"{name}.hook_attn_scores", _divide_scores(tau_layer)))
    return hooks


def learned_sinks(attention: Any) -> Float[Tensor, "head"] | None:
    """The learned logits that join the softmax as an extra column (gpt-oss), or None."""
    return getattr(attention.original_component, "sinks", None)


def _divide_scores(tau: Float[Tensor, "... head"]) -> Callable[..., Tensor]:
    def divide(scores: Float[Tensor, "batch head q k"], hook: Any) -> Float[Tensor, "batch head q k"]:
        # Masked entries stay as they are: dividing the finite mask by tau < 1 overflows to -inf, and a row in
        # which every key is masked (left padding) turns into NaN.
        masked = scores <= torch.finfo(scores.dtype).min / 2
        return torch.where(masked, scores, scores.masked_fill(masked, 0) / tau[..., None, None].to(scores))

    return divide


def _divide_query(tau: Float[Tensor, "... head"]) -> Callable[..., Tensor]:
    def divide(query: Float[Tensor, "batch pos head d_head"], hook: Any) -> Float[Tensor, "batch pos head d_head"]:
        return query / tau[..., None, :, None].to(query)

    return divide


def _divide_with_sinks(name: str, tau: Float[Tensor, "... head"], sinks: Tensor) -> list[Hook]:
    """The model appends the sink logits after `hook_attn_scores`, undivided; so the softmax is taken again."""
    divide, held = _divide_scores(tau), {}

    def hold(scores: Tensor, hook: Any) -> Tensor:
        held["scores"] = divide(scores, hook)
        return held["scores"]

    def renormalise(pattern: Float[Tensor, "batch head q k"], hook: Any) -> Float[Tensor, "batch head q k"]:
        scores = held.pop("scores").float()
        column = (sinks.float() / tau.float())[..., None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1].to(pattern)

    return [(f"{name}.hook_attn_scores", hold), (f"{name}.hook_pattern", renormalise)]


def find_seam(bridge: TransformerBridge, tokens: Int[Tensor, "pos"]) -> Seam:
    """The first seam that does what the definition says in every layer. Raises ModelError if none does."""
    failures = {}
    for seam in Seam:
        problem = _probe(bridge, seam, tokens)
        if problem is None:
            return seam
        failures[seam.value] = problem
    raise ModelError(
        "attention temperature cannot be applied to this model: "
        + "; ".join(f"at the {seam} seam {problem}" for seam, problem in failures.items())
    )


PROBE_TAU = 0.5


@torch.no_grad()
def _probe(bridge: TransformerBridge, seam: Seam, tokens: Int[Tensor, "pos"]) -> str | None:
    """What is wrong with the seam, or None. One forward pass: row 0 untouched, row l + 1 sharpened in layer l."""
    n_layers, n_heads = bridge.cfg.n_layers, bridge.cfg.n_heads
    tau = torch.ones(n_layers + 1, n_layers, n_heads, device=tokens.device)
    for layer in range(n_layers):
        tau[layer + 1, layer] = PROBE_TAU
    patterns: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook_fn(pattern: Tensor, hook: Any) -> None:
            patterns[layer] = pattern[[0, layer + 1]].float()

        return hook_fn

    try:
        hooks = temperature_hooks(bridge, tau, seam)
        hooks += [(f"blocks.{layer}.attn.hook_pattern", keep(layer)) for layer in range(n_layers)]
        with bridge.hooks(fwd_hooks=hooks), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an edit without effect is warned of; here it is found
            logits = bridge.original_model(tokens.expand(n_layers + 1, -1), use_cache=False).logits
    except (RuntimeError, ValueError, AttributeError, KeyError, TypeError) as error:
        return f"a probe fails ({str(error).splitlines()[0]})"
    for layer in range(n_layers):
        if layer not in patterns:
            return f"layer {layer} shows no attention pattern"
        untouched, edited = patterns[layer]
        expected = _tempered(untouched, learned_sinks(bridge.blocks[layer].attn) is not None)
        change = float((expected - untouched).abs().max())
        error_ = float((expected - edited).abs().max())
        if change > 0 and error_ > 0.05 * change + 4 * torch.finfo(logits.dtype).eps:
            return f"layer {layer}'s pattern does not become softmax(S / tau)"
        if torch.equal(logits[0], logits[layer + 1]):
            return f"an edit in layer {layer} does not reach the logits"
    return None


def _tempered(pattern: Float[Tensor, "head q k"], has_sink: bool) -> Float[Tensor, "head q k"]:
    """softmax(S / tau) from softmax(S): the logits are known up to a constant per row, which drops out."""
    if has_sink:
        pattern = torch.cat([pattern, 1 - pattern.sum(-1, keepdim=True)], dim=-1)
    tempered = (pattern.clamp(min=0).log() / PROBE_TAU).softmax(dim=-1)
    return tempered[..., :-1] if has_sink else tempered
