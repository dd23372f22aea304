"""Attention temperature on every architecture: definition, an independent reference, and what is refused."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from families import D_MODEL, ENDS, FAMILIES, VOCAB, WINDOW, load_family, tiny_tokenizer
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from asu_interp.errors import HeadError, ModelError, TemperatureError
from asu_interp.heads import HeadSet
from asu_interp.lens.temperature import smoothed, temperature_table
from asu_interp.models import Model, Seam, load_model
from asu_interp.models import model as model_module
from asu_interp.models.seams import find_seam

pytestmark = pytest.mark.usefixtures("one_thread")

QUERY_SEAM = {"gpt-j", "gpt-neo", "opt"}
TOLERANCE = 1e-4

# A full row, and one with three padded positions on the left.
TOKENS = torch.tensor([[5, 17, 98, 43, 66, 21, 7, 110, 31, 54], [0, 0, 0, 77, 12, 12, 90, 3, 64, 25]])
MASK = torch.tensor([[1] * 10, [0] * 3 + [1] * 7])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Model:
    return load_family(family)


@torch.no_grad()
def logits_of(model: Model, tokens: Tensor = TOKENS, mask: Tensor = MASK) -> Tensor:
    return model.hf(tokens, attention_mask=mask, use_cache=False).logits


def tau_table(model: Model, seed: int = 0) -> Tensor:
    """A temperature between 0.4 and 4 for every head, [layer, head]."""
    draw = torch.rand(model.n_layers, model.n_heads, generator=torch.Generator().manual_seed(seed))
    return 0.4 * 10**draw


# ---- an independent reference: the plain Hugging Face model with other attention ----------------


def slow_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """softmax(S / tau) V, one row and one query head at a time; s_aux are learned sinks."""
    n_rows, n_heads, n_query, d_head = query.shape
    scaling = d_head**-0.5 if scaling is None else scaling
    out = torch.zeros(n_rows, n_query, n_heads, value.shape[-1])
    for row in range(n_rows):
        visible = attention_mask[row, 0] == 0
        for head in range(n_heads):
            shared = head * key.shape[1] // n_heads
            scores = scaling * query[row, head] @ key[row, shared].T
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~visible, -math.inf)
            if s_aux is not None:
                scores = torch.cat([scores, s_aux[head].expand(n_query, 1)], dim=1)
            weights = torch.softmax(scores / module.tau[head], dim=1).nan_to_num()  # padding sees nothing
            out[row, :, head] = weights[:, : key.shape[2]] @ value[row, shared]
    return out, None


AttentionInterface.register("slow", slow_attention)
AttentionMaskInterface.register("slow", eager_mask)


class TemperedFunctional:
    """torch.nn.functional for architectures that write their attention inline; only softmax is another."""

    tau: Tensor  # [head], of the layer that runs

    def __getattr__(self, name: str) -> Any:
        return getattr(nn.functional, name)

    def softmax(self, scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        weights = torch.zeros_like(scores)
        for head in range(scores.shape[1]):
            own = scores[:, head].masked_fill(scores[:, head] < -1e30, -math.inf)
            weights[:, head] = torch.softmax(own / self.tau[head], dim=-1).nan_to_num()
        return weights


def attention_modules(plain: PreTrainedModel) -> list[nn.Module]:
    """The innermost attention module of every layer."""
    named = [module for module in plain.modules() if type(module).__name__.endswith("Attention")]
    return [module for module in named if not any(inner in named for inner in list(module.modules())[1:])]


@torch.no_grad()
def reference_logits(name: str, table: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    plain = FAMILIES[name]()
    layers = attention_modules(plain)
    assert len(layers) == len(table)
    with monkeypatch.context() as patch:
        if name in ("gpt-j", "gpt-neo", "bloom", "mpt", "falcon"):
            functional = TemperedFunctional()
            source = sys.modules[type(plain).__module__]
            patch.setattr(source, "F", functional, raising=False)
            patch.setattr(source, "nn", SimpleNamespace(functional=functional))
            plain.config._attn_implementation = "eager"
            for layer, tau in zip(layers, table, strict=True):
                layer.register_forward_pre_hook(lambda *_, tau=tau: setattr(functional, "tau", tau))
        else:
            plain.config._attn_implementation = "slow"
            for layer, tau in zip(layers, table, strict=True):
                layer.tau = tau
        return plain(TOKENS, attention_mask=MASK, use_cache=False).logits


def visible_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference at positions that are not padding."""
    return float((ours - theirs)[MASK.bool()].abs().max())


def test_the_reference_at_tau_1_is_the_hugging_face_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FAMILIES[family]()
    ones = torch.ones(len(attention_modules(plain)), plain.config.num_attention_heads)
    with torch.no_grad():
        untouched = plain(TOKENS, attention_mask=MASK, use_cache=False).logits
    assert visible_difference(reference_logits(family, ones, monkeypatch), untouched) < 1e-5


@pytest.mark.parametrize("seed", [0, 1])
def test_smoothed_logits_are_those_of_the_reference(
    family: str, model: Model, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tau_table(model, seed)
    reference = reference_logits(family, table, monkeypatch)
    with smoothed(model, table):
        ours = logits_of(model)
    assert visible_difference(logits_of(model), reference) > 1000 * TOLERANCE
    assert visible_difference(ours, reference) < TOLERANCE


def test_the_seam(family: str, model: Model) -> None:
    assert model.seam is (Seam.QUERY if family in QUERY_SEAM else Seam.SCORES)


# ---- invariants of the definition ---------------------------------------------------------------


@torch.no_grad()
def patterns(model: Model, tau: Any, tokens: Tensor = TOKENS[:1]) -> Tensor:
    """Attention weights under tau, [layer, row, head, q, k]."""
    kept: dict[str, Tensor] = {}

    def keep(pattern: Tensor, hook: HookPoint) -> None:
        kept[hook.name] = pattern

    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.n_layers)]
    with smoothed(model, tau), model.bridge.hooks(fwd_hooks=[(name, keep) for name in names]):
        model.hf(tokens, use_cache=False)
    return torch.stack([kept[name] for name in names])


def own_patterns(model: Model, taus: list[float]) -> Tensor:
    """[tau, layer, head, q, k]: each layer's pattern while only that layer is smoothed."""
    n_layers, n_taus = model.n_layers, len(taus)
    table = torch.ones(n_taus, n_layers, n_layers, model.n_heads)
    for i, tau in enumerate(taus):
        for layer in range(n_layers):
            table[i, layer, layer] = tau
    rows = TOKENS[:1].expand(n_taus * n_layers, -1)
    out = patterns(model, table.flatten(0, 1), rows).unflatten(1, (n_taus, n_layers))
    return torch.stack([out[layer, :, layer] for layer in range(n_layers)], dim=1)


def with_sink(family: str, pattern: Tensor) -> Tensor:
    """Rows that sum to one: what a learned sink takes away is an entry of its own."""
    if family != "gpt-oss":
        return pattern
    return torch.cat([pattern, 1 - pattern.sum(-1, keepdim=True)], dim=-1)


def test_row_entropy_never_falls_when_tau_rises(family: str, model: Model) -> None:
    pattern = with_sink(family, own_patterns(model, [0.5, 1, 1.25, 2, 4, 64])).double().clamp(min=0)
    entropy = torch.special.entr(pattern).sum(-1)
    assert (entropy.diff(dim=0) >= -1e-6).all()
    assert (entropy[-1] - entropy[0])[..., 3:].mean() > 0.3


def test_a_very_high_tau_is_uniform_over_the_visible_keys(family: str, model: Model) -> None:
    config, n = model.hf.config, TOKENS.shape[1]
    back = torch.arange(n)[:, None] - torch.arange(n)
    for layer, pattern in enumerate(own_patterns(model, [1e6])[0]):
        kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
        local = kinds[layer] in ("sliding_attention", "local") if kinds else family == "mistral"
        assert local <= (family in ("mistral", "gemma2", "gemma3", "gpt-oss", "gpt-neo"))
        visible = (back >= 0) & (back < (WINDOW if local else n))
        entries = visible.sum(-1, keepdim=True) + (family == "gpt-oss")
        torch.testing.assert_close(pattern, (visible / entries).expand_as(pattern), atol=2e-5, rtol=0)


def test_tau_1_changes_no_bit(model: Model) -> None:
    before = logits_of(model)
    ones = torch.ones(model.n_layers, model.n_heads)
    for tau, heads in [(1, None), (ones, None), (ones.expand(2, -1, -1), None), (3.0, "none")]:
        with smoothed(model, tau, heads and HeadSet.parse(heads, model)):
            assert torch.equal(logits_of(model), before)


def test_leaving_restores_every_bit(model: Model) -> None:
    before = logits_of(model)
    with smoothed(model, 2.0):
        assert not torch.equal(logits_of(model), before)
    assert torch.equal(logits_of(model), before)


def test_leaving_restores_every_bit_after_an_exception(model: Model) -> None:
    before = logits_of(model)
    with pytest.raises(ZeroDivisionError), smoothed(model, 2.0):
        raise ZeroDivisionError
    with pytest.raises(IndexError), smoothed(model, 2.0):  # one from the middle of the forward pass
        logits_of(model, torch.full_like(TOKENS, VOCAB))
    with pytest.raises(ZeroDivisionError), smoothed(model, 2.0), hook_that_raises(model):
        logits_of(model)
    assert torch.equal(logits_of(model), before)


@contextmanager
def hook_that_raises(model: Model) -> Iterator[None]:
    def fail(pattern: Tensor, hook: HookPoint) -> None:
        raise ZeroDivisionError

    with model.bridge.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", fail)]):
        yield


def test_one_head_changes_nothing_before_it_nor_beside_it(model: Model) -> None:
    """Also the proof that tau indexes query heads: with grouped keys, heads 2 and 3 share theirs."""
    layer, head = 1, 3
    others = [h for h in range(model.n_heads) if h != head]
    _, before = model.bridge.run_with_cache(TOKENS[:1])
    with smoothed(model, 2.5, HeadSet.of([(layer, head)], model)):
        _, after = model.bridge.run_with_cache(TOKENS[:1])
    early = [name for name in before if name.startswith(("embed", "pos_embed", "blocks.0."))]
    assert len(early) > 10
    for name in [*early, f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.attn.hook_v"]:
        assert torch.equal(before[name], after[name]), name
    pattern = f"blocks.{layer}.attn.hook_pattern"
    assert torch.equal(before[pattern][:, others], after[pattern][:, others])
    assert (before[pattern][:, head] - after[pattern][:, head]).abs().max() > 0.01
    z = f"blocks.{layer}.attn.hook_z"
    difference = (
        (before[z] - after[z]).unflatten(-1, (model.n_heads, -1)) if before[z].ndim == 3 else before[z] - after[z]
    )
    assert (difference[:, :, others] == 0).all()
    assert difference[:, :, head].abs().max() > 0.01


def test_low_tau_and_left_padding_give_numbers(model: Model) -> None:
    before = logits_of(model)
    for tau in (0.5, 0.01):
        with smoothed(model, tau):
            after = logits_of(model)
        assert after.isfinite().all()
        assert visible_difference(before, after) > 0.01


def test_rows_with_their_own_tables_equal_separate_runs(model: Model) -> None:
    tables = torch.stack([tau_table(model, seed) for seed in (2, 3)])
    with smoothed(model, tables):
        together = logits_of(model)
    for row, table in enumerate(tables):
        with smoothed(model, table):
            alone = logits_of(model)[row]
        visible = MASK[row].bool()
        torch.testing.assert_close(together[row, visible], alone[visible], atol=1e-6, rtol=1e-6)


def test_cached_generation_under_tau_equals_uncached_steps(model: Model) -> None:
    with smoothed(model, tau_table(model)):
        logits, sequences = greedy_with_cache(model, 6)
        for row, mask in enumerate(MASK.bool()):
            sequence = torch.cat([TOKENS[row, mask], sequences[row, len(mask) :]])[None]
            uncached = logits_of(model, sequence, torch.ones_like(sequence))[0, -7:-1]
            torch.testing.assert_close(logits[row], uncached, atol=2e-5, rtol=0)


def greedy_with_cache(model: Model, steps: int) -> tuple[Tensor, Tensor]:
    out = model.hf.generate(
        TOKENS,
        attention_mask=MASK,
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(out.logits, dim=1), out.sequences


@pytest.mark.parametrize("name", ["llama", "gpt-j", "gemma2", "gpt-oss"])
def test_the_gradient_of_a_learned_tau(name: str) -> None:
    """Against finite differences; layer 1 starts at tau = 1, where it has a gradient all the same."""
    model = load_family(name)
    tau = tau_table(model)
    tau[1] = 1.0

    def score(table: Tensor) -> Tensor:
        with smoothed(model, table):
            return model.hf(TOKENS[:1], use_cache=False).logits[0, -1, 5].double()

    learned = tau.clone().requires_grad_()
    score(learned).backward()
    assert learned.grad is not None
    for place in [(0, 0), (1, 1), (1, 2)]:
        step = torch.zeros_like(tau)
        step[place] = 0.02
        with torch.no_grad():
            slope = float(score(tau + step) - score(tau - step)) / 0.04
        assert float(learned.grad[place]) == pytest.approx(slope, abs=1e-3, rel=0.02)
        assert abs(slope) > 1e-3


# ---- what is refused ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Model:
    return load_family("llama")


def deaden(point: HookPoint) -> None:
    """Make a hook point ignore what its hooks return, as those do that fire after the fact."""

    def add_hook(edit: Any, *args: Any, **kwargs: Any) -> Any:
        def ignored(value: Tensor, hook: HookPoint) -> None:
            edit(value, hook=hook)

        return HookPoint.add_hook(point, ignored, *args, **kwargs)

    point.add_hook = add_hook  # type: ignore[method-assign]


def test_a_model_with_dead_seams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrap_and_deaden(hf_model: PreTrainedModel, tokenizer: Any) -> Any:
        weights, bridge = wrap(hf_model, tokenizer)
        for name in ("hook_attn_scores", "q.hook_out"):
            deaden(bridge.hook_dict[f"blocks.1.attn.{name}"])
        return weights, bridge

    wrap = model_module._wrap
    monkeypatch.setattr(model_module, "_wrap", wrap_and_deaden)
    reasons = r"scores seam layer 1's pattern does not.* query seam layer 1's pattern does not"
    with pytest.raises(ModelError, match=reasons):
        load_model(FAMILIES["llama"](), tokenizer=tiny_tokenizer())
    unchecked = load_model(FAMILIES["llama"](), tokenizer=tiny_tokenizer(), check=False)
    assert [check.name for check in unchecked.checks if not check.passed] == ["temperature seam"]
    with pytest.raises(ModelError, match=reasons), smoothed(unchecked, 2.0):
        pytest.fail("nothing may be smoothed here")


def test_a_dead_scores_seam_alone_leaves_the_query_seam() -> None:
    bridge = load_family("llama").bridge
    for layer in range(3):
        deaden(bridge.hook_dict[f"blocks.{layer}.attn.hook_attn_scores"])
    assert find_seam(bridge, TOKENS[0]) is Seam.QUERY


def test_a_pattern_that_is_not_used_is_found() -> None:
    bridge = load_family("llama").bridge

    def mute(out: Any, hook: HookPoint) -> Any:
        return torch.zeros_like(out)

    muted = bridge.hooks(fwd_hooks=[("blocks.1.attn.hook_out", mute)])
    with muted, pytest.raises(ModelError, match="scores seam an edit in layer 1 does not reach the logits"):
        find_seam(bridge, TOKENS[0])


@pytest.mark.parametrize("name", ["bloom", "mpt", "gemma2"])
def test_the_query_seam_is_no_substitute_where_scores_hold_more_than_products(name: str) -> None:
    """ALiBi and the soft-cap: dividing the query is another function of tau, not to be taken for this one."""
    bridge = load_family(name).bridge
    for layer in range(len(bridge.blocks)):
        deaden(bridge.hook_dict[f"blocks.{layer}.attn.hook_attn_scores"])
    dead = "at the {} seam layer 0's pattern does not become"
    with pytest.raises(ModelError, match=f"{dead.format('scores')}.*{dead.format('query')}"):
        find_seam(bridge, TOKENS[0])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            transformers.MambaConfig(num_hidden_layers=2, state_size=4, hidden_size=D_MODEL, vocab_size=VOCAB),
            "0, 1",
        ),
        (
            transformers.Lfm2Config(
                num_hidden_layers=2,
                layer_types=["full_attention", "conv"],
                hidden_size=D_MODEL,
                intermediate_size=48,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCAB,
                **ENDS,
            ),
            "1",
        ),
    ],
)
def test_an_architecture_without_attention_is_refused(config: Any, reason: str) -> None:
    hf_model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=f"has no attention to look at in layers {reason}$"):
        load_model(hf_model, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("tau", [0, 0.0, -1, math.nan, math.inf, -math.inf])
def test_a_tau_that_is_not_finite_and_positive_is_refused(llama: Model, tau: float) -> None:
    for given in (tau, torch.tensor([1.0, tau, 2.0])):
        with pytest.raises(TemperatureError, match=r"^tau = \S+: a temperature is finite and greater than 0$"):
            temperature_table(llama, given)
    with pytest.raises(TemperatureError, match=re.escape(f"tau = {float(tau)}")), smoothed(llama, tau):
        pytest.fail("entered")


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 3), (4, 3), (2, 4), (5, 2, 4), (1, 1, 3, 4), (0,)])
def test_a_tau_of_the_wrong_shape_is_refused(llama: Model, shape: tuple[int, ...]) -> None:
    message = f"tau has shape {shape}; allowed are a number, [3] (layers), [3, 4] (layers, heads), or [rows, 3, 4]"
    with pytest.raises(TemperatureError, match=re.escape(message)):
        temperature_table(llama, torch.ones(shape))


def test_the_table(llama: Model) -> None:
    heads = HeadSet.parse("0.1,2.*", llama)
    assert temperature_table(llama, 2).tolist() == [[2.0] * 4] * 3
    assert temperature_table(llama, torch.tensor([2.0, 3.0, 4.0]))[:, 0].tolist() == [2.0, 3.0, 4.0]
    expected = [[1.0, 2.0, 1.0, 1.0], [1.0] * 4, [2.0] * 4]
    assert temperature_table(llama, 2, heads).tolist() == expected
    assert temperature_table(llama, torch.full((5, 3, 4), 2.0), heads).tolist() == [expected] * 5


def test_heads_of_another_model_are_refused(llama: Model) -> None:
    foreign = HeadSet.parse("all", load_family("qwen2"))
    message = "HeadSet of a model with 2 layers of 4 heads; this model has 3 of 4"
    with pytest.raises(HeadError, match=message), smoothed(llama, 2.0, foreign):
        pytest.fail("entered")


def test_heads_that_the_model_does_not_have_are_refused(llama: Model) -> None:
    with pytest.raises(HeadError, match=r'HeadSet "3\.0": layer 3, this model has layers 0-2'):
        HeadSet.of([(3, 0)], llama)
    with pytest.raises(HeadError, match=r'HeadSet "0\.4": head 4, this model has heads 0-3'):
        HeadSet.parse("0.4", llama)
