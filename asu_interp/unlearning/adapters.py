"""LoRA adapters (peft) on a bridged model: on the modules that the forward pass really uses.

On a fused projection (GPT-2, NeoX, Phi-3) TransformerLens computes with split copies, so an adapter on the fused
module would do nothing, silently; here it goes on the split one. Merging adds B A to the live weight, which
`Model.save` writes back into the fused one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from asu_interp.errors import RunError
from asu_interp.models import Model

PROJECTIONS = ("q", "k", "v", "o")


def add_adapters(
    model: Model, rank: int, *, layers: Iterable[int] | None = None, alpha: float | None = None, seed: int = 0
) -> list[nn.Parameter]:
    """Put rank-r adapters on W_Q, W_K, W_V, W_O of the layers (None: all); everything else is frozen.

    Returns the adapters' parameters. Scale is alpha / rank, alpha = 2 rank by default. Raises RunError.
    """
    chosen = range(model.n_layers) if layers is None else layers
    projections = {id(getattr(model.bridge.blocks[layer].attn, p).original_component) for layer in chosen
                   for p in PROJECTIONS}  # fmt: skip
    names = [name for name, module in model.hf.named_modules() if id(module) in projections]
    if len(set(names)) < len(projections):
        raise RunError("this model has attention projections that no adapter can be put on")
    for parameter in model.bridge.parameters():
        parameter.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=int(alpha or 2 * rank), lora_dropout=0.0, target_modules=names)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model.hf)
    return [p for layer in adapters(model) for n, p in layer.named_parameters() if "lora_" in n]


def adapters(model: Model) -> list[Any]:
    """The LoRA layers now in the model."""
    return [module for module in model.hf.modules() if isinstance(module, LoraLayer)]


@contextmanager
def adapters_off(model: Model) -> Iterator[None]:
    """Within the block the model is the frozen base: a teacher that needs no second copy."""
    layers = adapters(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merge_adapters(model: Model) -> None:
    """Add every adapter's B A to its weight and take the adapters out."""
    for parent in list(model.hf.modules()):
        for name, child in list(parent.named_children()):
            layer: Any = child
            if isinstance(child, LoraLayer):
                base = layer.get_base_layer()
                base.weight += layer.get_delta_weight("default").to(base.weight)
                parent._modules[name] = base
    for parameter in model.bridge.parameters():
        parameter.requires_grad_(True)
