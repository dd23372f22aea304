"""The weights of a bridged model under their Hugging Face names.

TransformerLens wraps a Hugging Face model in place: the parameters stay the same objects, but their names
change, and a fused projection (GPT-2 `c_attn`, NeoX `query_key_value`, Phi-3 `qkv_proj` and `gate_up_proj`) is
split into new modules, after which the fused weight is a stale copy. So the names are taken before wrapping,
and what was trained in the split modules is written back into the fused weight before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import (
    JointGateUpMLPBridge,
    JointQKVAttentionBridge,
)
from transformers import PreTrainedModel


def named_weights(hf_model: PreTrainedModel) -> dict[str, Tensor]:
    """Name -> the live tensor, for every entry of the (not yet wrapped) model's state dict."""
    persistent = hf_model.state_dict(keep_vars=True)
    return dict(persistent)


@torch.no_grad()
def write_back_fused(bridge: TransformerBridge) -> None:
    """Copy the split projections into the fused weights they were taken from.

    Which element went where is found by splitting numbered weights: right for every layout, interleaved or not.
    """
    for component, split, parts in fused_projections(bridge):
        sources = list(component.original_component.parameters())
        with _numbered(sources):
            numbered_parts = split(component.original_component)
        for part, numbered in zip(parts, numbered_parts, strict=True):
            for name, numbers in numbered.named_parameters():
                trained = part.original_component.get_parameter(name).detach().clone().reshape(-1)
                _scatter(sources, numbers.reshape(-1).long(), trained)


def fused_projections(bridge: TransformerBridge) -> Iterator[tuple]:
    for component in bridge.modules():
        if isinstance(component, JointQKVAttentionBridge):
            yield component, component.split_qkv_matrix, (component.q, component.k, component.v)
        elif isinstance(component, JointGateUpMLPBridge):
            yield component, component.split_gate_up_matrix, (component.gate, getattr(component, "in"))


class _numbered:
    """Inside the block every element of the parameters holds its own number, counted through all of them."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters, self.kept = parameters, [parameter.data for parameter in parameters]

    def __enter__(self) -> None:
        start = 0
        for parameter in self.parameters:
            # float64 counts exactly up to 2^53
            numbers = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
            parameter.data = numbers.view(parameter.shape)
            start += parameter.numel()

    def __exit__(self, *_: object) -> None:
        for parameter, data in zip(self.parameters, self.kept, strict=True):
            parameter.data = data


def _scatter(parameters: list[nn.Parameter], numbers: Tensor, values: Tensor) -> None:
    start = 0
    for parameter in parameters:
        here = (numbers >= start) & (numbers < start + parameter.numel())
        flat = parameter.data.reshape(-1)  # a view where the parameter is contiguous
        flat[numbers[here].to(flat.device) - start] = values[here].to(flat)
        if flat.data_ptr() != parameter.data.data_ptr():
            parameter.data.copy_(flat.view(parameter.shape))
        start += parameter.numel()
