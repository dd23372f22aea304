"""Is the wrapped model still the model? Each check compares the bridge with something that does not use it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from asu_interp.errors import ModelError
from asu_interp.models.seams import Seam, find_seam

# Largest difference of logits allowed, in units of their standard deviation.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
N_PROBE, N_NEW, N_PAD = 8, 4, 3


@dataclass(frozen=True)
class Check:
    """One health check: its name, whether it passed, and what was seen."""

    name: str
    passed: bool
    detail: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe_tokens(vocabulary: int, device: torch.device) -> Int[Tensor, "pos"]:
    """A few token ids spread over the vocabulary."""
    return (7919 * torch.arange(1, N_PROBE + 1, device=device)) % vocabulary


@torch.no_grad()
def reference_logits(hf_model: Any, tokens: Int[Tensor, "pos"]) -> Float[Tensor, "pos vocab"]:
    """Logits of the plain model; taken before TransformerLens wraps it. Raises ModelError if it has none."""
    try:
        return hf_model(tokens[None], use_cache=False).logits[0].float()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{type(hf_model).__name__} is no decoder language model: {error}") from error


def check_model(
    bridge: TransformerBridge, tokens: Int[Tensor, "pos"], reference: Float[Tensor, "pos vocab"]
) -> tuple[list[Check], Seam | None]:
    """All checks, and the temperature seam (None if there is none)."""
    checks = [_parity(bridge, tokens, reference), *_generation(bridge, tokens)]
    try:
        seam: Seam | None = find_seam(bridge, tokens)
        checks.append(Check("temperature seam", True, f"{seam.value}: moves every layer's pattern"))  # type: ignore[union-attr]
    except ModelError as error:
        seam = None
        checks.append(Check("temperature seam", False, str(error)))
    return checks, seam


@torch.no_grad()
def _parity(bridge: TransformerBridge, tokens: Tensor, reference: Tensor) -> Check:
    logits = bridge.original_model(tokens[None], use_cache=False).logits[0].float()
    return _compare("parity", "logits of the wrapped and the plain model", logits, reference, bridge.cfg.dtype)


@torch.no_grad()
def _generation(bridge: TransformerBridge, tokens: Tensor) -> list[Check]:
    """Greedy steps with the key/value cache, without and with left padding, against one uncached forward."""
    try:
        sequence, cached = _greedy(bridge, tokens, padding=0)
        _, padded = _greedy(bridge, tokens, padding=N_PAD)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        return [Check("generation", False, f"generate() fails: {error}")]
    logits = bridge.original_model(sequence[None], use_cache=False).logits[0].float()
    uncached = logits[len(tokens) - 1 : -1]
    return [
        _compare("generation", "logits of cached and uncached steps", cached, uncached, bridge.cfg.dtype),
        _compare("left padding", "logits of padded and unpadded steps", padded, cached, bridge.cfg.dtype),
    ]


def _greedy(bridge: TransformerBridge, tokens: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    padded = torch.cat([tokens.new_zeros(padding), tokens])
    mask = torch.ones_like(padded)
    mask[:padding] = 0
    hf_model: Any = bridge.original_model
    out = hf_model.generate(
        padded[None],
        attention_mask=mask[None],
        max_new_tokens=N_NEW,
        min_new_tokens=N_NEW,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, padding:], torch.cat(out.logits).float()


def _compare(name: str, what: str, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> Check:
    tolerance = TOLERANCE.get(dtype, 1e-3) * float(theirs.std())
    difference = float((ours - theirs).abs().max())
    passed = bool(difference <= tolerance)  # False for NaN
    return Check(name, passed, f"{what} differ by {difference:.1e} (allowed {tolerance:.1e})")
