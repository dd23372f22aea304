"""Looking: entropy, locality, response and patching against slow, obvious second implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from families import load_family
from transformer_lens import patching

from asu_interp.data.batches import encode_facts, make_batch
from asu_interp.data.facts import Fact
from asu_interp.errors import FactsError, HeadError, TemperatureError
from asu_interp.heads import HeadSet
from asu_interp.intervals import bootstrap_mean
from asu_interp.lens import branching
from asu_interp.lens import patching as lens_patching
from asu_interp.lens.attention import attention_entropy
from asu_interp.lens.locality import classify_heads
from asu_interp.lens.patching import locate_heads, make_pairs
from asu_interp.lens.response import (
    TemperatureResponse,
    TokenScores,
    classify_tokens,
    head_selectivity,
    score_facts,
    temperature_response,
    token_scores,
)
from asu_interp.lens.temperature import smoothed
from asu_interp.models import Model

PATCHED = ["gpt2", "gpt-neox", "llama", "qwen3", "gemma3", "opt", "bloom", "mistral", "mixtral", "gpt-j"]
# words that the tiny tokenizer begins with different tokens
TARGETS = ("coast", "island", "the west", "in", "on")


def facts_of(n: int = 5) -> list[Fact]:
    """Facts of different length whose subjects all have the same number of tokens."""
    subjects = ["x", "q", "z", "v", "j"][:n]
    return [
        Fact(f"{'so ' * i}what is the sea of {s}?", f"The sea of {s} is {t}.", t, subject=s, relation="sea")
        for i, (s, t) in enumerate(zip(subjects, TARGETS, strict=False))
    ]


def same_length_facts() -> list[Fact]:
    return [
        Fact(f"what is the sea of {s}?", f"The sea of {s} is {t}.", t, subject=s, relation="sea")
        for s, t in zip(("x", "q", "z"), TARGETS, strict=False)
    ]


@pytest.fixture
def any_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models hardly tell two subjects apart; what is tested here is exactness, on raw logits."""
    monkeypatch.setattr(lens_patching, "MIN_DIFFERENCE", 0.0)


def patterns(model: Model, fact: Fact) -> tuple[torch.Tensor, int]:
    """[layer, head, query, key] of one unpadded fact, and the number of prompt tokens."""
    (encoded,) = encode_facts(model, [fact])
    with torch.no_grad():
        _, cache = model.bridge.run_with_cache(torch.tensor([encoded.prompt + encoded.answer], device=model.device))
    stacked = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in range(model.n_layers)])
    return stacked, len(encoded.prompt)


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma2"])
def model(request: pytest.FixtureRequest) -> Model:
    return load_family(request.param)


def test_entropy_equals_a_loop_over_rows(model: Model) -> None:
    facts = facts_of()
    rows: list[list[list[float]]] = []
    for fact in facts:
        pattern, n_prompt = patterns(model, fact)
        for query in range(n_prompt - 1, pattern.shape[2] - 1):  # the rows that predict an answer token
            per_head = [
                [-sum(p * math.log(p) for p in head[query].tolist() if p > 0) for head in layer] for layer in pattern
            ]
            rows.append(per_head)
    expected = torch.tensor(rows).mean(dim=0)
    torch.testing.assert_close(attention_entropy(model, facts, batch_size=2), expected, atol=1e-5, rtol=1e-4)


def test_distance_and_sink_share_equal_the_formula(model: Model) -> None:
    facts = facts_of()
    distance, without, sink = [], [], []
    for fact in facts:
        pattern, n_prompt = patterns(model, fact)
        d, w, k = (torch.zeros(model.n_layers, model.n_heads) for _ in range(3))
        answer = range(n_prompt, pattern.shape[2])
        for t in answer:
            for layer in range(model.n_layers):
                for head in range(model.n_heads):
                    row = pattern[layer, head, t]
                    d[layer, head] += sum(float(row[s]) * (t - s) for s in range(t + 1))
                    rest = sum(float(row[s]) for s in range(1, t + 1))
                    w[layer, head] += sum(float(row[s]) * (t - s) for s in range(1, t + 1)) / rest
                    k[layer, head] += float(row[0])
        distance.append(d / len(answer))
        without.append(w / len(answer))
        sink.append(k / len(answer))
    result = classify_heads(model, facts, batch_size=2)
    torch.testing.assert_close(result.distance, torch.stack(distance).mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(result.sink_share, torch.stack(sink).mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(result.distance_without_sink, torch.stack(without).mean(0), atol=1e-3, rtol=1e-3)


def test_classes_are_the_ends_of_the_ranking(model: Model) -> None:
    for exclude_sinks in (False, True):
        result = classify_heads(model, facts_of(), rho=0.25, exclude_sinks=exclude_sinks)
        ranked = result.distance_without_sink if exclude_sinks else result.distance
        size = round(0.25 * model.n_layers * model.n_heads)
        assert len(result.local) == len(result.global_) == size
        inside = [float(ranked[pair]) for pair in result.mid]
        assert max(float(ranked[pair]) for pair in result.local) <= min(inside)
        assert min(float(ranked[pair]) for pair in result.global_) >= max(inside)
        assert len(result.local | result.mid | result.global_) == model.n_layers * model.n_heads
        assert not (result.local & result.global_)


@pytest.mark.parametrize("rho", [0.0, 0.6, float("nan")])
def test_rho_is_checked(model: Model, rho: float) -> None:
    with pytest.raises(HeadError, match="rho"):
        classify_heads(model, facts_of(), rho=rho)


def test_token_scores_equal_a_loop() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 3, 10, 5, 5, 2])
    scores = token_scores(logits, targets)
    for i, y in enumerate(targets.tolist()):
        z = logits[i].tolist()
        assert float(scores.nll[i]) == pytest.approx(math.log(sum(map(math.exp, z))) - z[y], abs=1e-12)
        assert float(scores.margin[i]) == pytest.approx(z[y] - max(v for j, v in enumerate(z) if j != y), abs=1e-12)


def test_scores_come_in_the_order_of_the_facts(model: Model) -> None:
    facts = facts_of()
    together = score_facts(model, facts, batch_size=2)
    alone = [score_facts(model, [fact]) for fact in facts]
    torch.testing.assert_close(together.nll, torch.cat([s.nll for s in alone]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together.margin, torch.cat([s.margin for s in alone]), atol=1e-5, rtol=1e-5)


def test_response_is_what_smoothing_gives(model: Model) -> None:
    facts, heads = facts_of(3), HeadSet.parse("1.*", model)
    result = temperature_response(model, facts, [1.0, 3.0], heads=heads)
    torch.testing.assert_close(result.nll[0], result.untouched.nll, atol=0, rtol=0)
    with smoothed(model, 3.0, heads):
        expected = score_facts(model, facts)
        entropy = attention_entropy(model, facts)
    torch.testing.assert_close(result.nll[1], expected.nll)
    torch.testing.assert_close(result.entropy[1], entropy)
    assert (result.entropy[1, 1] >= result.entropy[0, 1] - 1e-6).all()
    classes = classify_tokens(model, facts)
    change = (expected.nll - result.untouched.nll)[classes.factual].mean()
    assert result.by_class["factual"]["nll_change"][1].mean == pytest.approx(float(change), abs=1e-6)
    with pytest.raises(TemperatureError):
        temperature_response(model, facts, [])


def made_up_response(margin: list[list[float]], factual: list[bool]) -> TemperatureResponse:
    """A response at taus 1, 2, 3 with given margins."""
    m = torch.tensor(margin)
    return TemperatureResponse(
        (1.0, 2.0, 3.0), "all", -m, m, torch.zeros(3, 1, 1), torch.tensor(factual),
        torch.arange(len(factual)), TokenScores(-m[0], m[0]),
    )  # fmt: skip


def test_lost_counts_only_what_was_held_and_gives_the_interval() -> None:
    factual = [True, True, True, False, False]
    # fact 2 is not held at tau = 1, so it cannot be lost
    selective = made_up_response([[1, 1, -1, 1, 1], [-1, 1, -1, 1, 1], [-1, -1, -1, -1, 1]], factual)
    assert [m.mean for m in selective.by_class["factual"]["lost"]] == [0.0, 0.5, 1.0]
    assert [m.mean for m in selective.by_class["functional"]["lost"]] == [0.0, 0.0, 0.5]
    assert selective.interval == (2.0, 2.0)
    blunt = made_up_response([[1, 1, 1, 1, 1], [1, 1, 1, -1, 1], [-1, -1, -1, -1, -1]], factual)
    assert blunt.interval is None


def test_selectivity_equals_smoothing_one_head_at_a_time(model: Model) -> None:
    facts = facts_of(2)
    result = head_selectivity(model, facts, tau=3.0, max_rows=5)
    classes, before = classify_tokens(model, facts), score_facts(model, facts).nll
    for layer in range(model.n_layers):
        for head in range(model.n_heads):
            with smoothed(model, 3.0, HeadSet.of([(layer, head)], model)):
                change = score_facts(model, facts).nll - before
            assert float(result.factual[layer, head]) == pytest.approx(float(change[classes.factual].mean()), abs=1e-4)
            assert float(result.functional[layer, head]) == pytest.approx(
                float(change[~classes.factual].mean()), abs=1e-4
            )
    assert result.selectivity.abs().max() > 2e-3  # 20 times the tolerance


@pytest.mark.usefixtures("any_difference")
@pytest.mark.parametrize("name", PATCHED)
@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_patching_equals_transformer_lens_one_cell_at_a_time(name: str, direction: str) -> None:
    model = load_family(name)
    facts = same_length_facts()
    result = locate_heads(model, facts, direction=direction, max_rows=3 * model.n_heads)
    pairs, unaligned = make_pairs(model, facts, facts)
    assert len(pairs) == 3 and not unaligned
    kept = [pair for pair in pairs if pair.fact.prompt not in result.left_out]
    assert len(kept) == len(result.pairs) > 0
    for pair, ours in zip(kept, result.per_pair, strict=True):
        with torch.no_grad():
            clean, corrupted = (pair.metric(model.bridge(t[None])[0, -1]) for t in (pair.clean, pair.corrupted))
            source, base = (pair.clean, pair.corrupted) if direction == "denoising" else (pair.corrupted, pair.clean)
            _, cache = model.bridge.run_with_cache(source[None])
            patched = patching.get_act_patch_attn_head_out_all_pos(
                model.bridge, base[None], cache, lambda logits, pair=pair: pair.metric(logits[0, -1])
            )
        # raw logit differences: ours undone from the normalised score
        ours_raw = (
            corrupted + ours * (clean - corrupted) if direction == "denoising" else clean - ours * (clean - corrupted)
        )
        torch.testing.assert_close(ours_raw, patched, atol=1e-4, rtol=0)
        assert (
            patched - (corrupted if direction == "denoising" else clean)
        ).abs().max() > 2e-3  # 20 times the tolerance


@pytest.mark.usefixtures("any_difference")
def test_a_model_whose_batch_cannot_grow_carries_its_copies_from_layer_0() -> None:
    model = load_family("bloom")
    facts = same_length_facts()
    asked: list[bool] = []
    run = branching._run

    def spy(*args: object, grow: bool) -> torch.Tensor:
        asked.append(grow)
        return run(*args, grow=grow)  # type: ignore[arg-type]

    branching._run = spy  # type: ignore[assignment]
    try:
        locate_heads(model, facts, max_pairs=1)
    finally:
        branching._run = run
    assert asked == [True, False]


@pytest.mark.usefixtures("any_difference")
def test_facts_that_cannot_be_paired_are_reported(model: Model) -> None:
    facts = same_length_facts()
    longer = Fact("what is the sea of xqz?", "The sea of xqz is on.", "on",
                  subject="xqz", relation="sea")  # fmt: skip
    alone = Fact("what is the age of x?", "The age of x is on.", "on", subject="x", relation="age")
    result = locate_heads(model, [*facts, longer, alone])
    assert [reason.split(": ")[1] for reason in result.unaligned] == [
        "none of the same token length", "no other subject of this relation",
    ]  # fmt: skip
    with pytest.raises(FactsError, match="no pair"):
        locate_heads(model, [alone])


def test_pairs_that_hardly_differ_are_left_out_and_counted(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lens_patching, "MIN_DIFFERENCE", 0.0)
    pairs, _ = make_pairs(model, same_length_facts(), same_length_facts())
    with torch.no_grad():
        differences = [
            abs(float(p.metric(model.bridge(p.clean[None])[0, -1]) - p.metric(model.bridge(p.corrupted[None])[0, -1])))
            for p in pairs
        ]
    limit = sorted(differences)[1]
    monkeypatch.setattr(lens_patching, "MIN_DIFFERENCE", limit * 0.999)
    result = locate_heads(model, same_length_facts())
    assert len(result.pairs) == 2
    assert result.left_out == (pairs[differences.index(min(differences))].fact.prompt,)


@pytest.mark.usefixtures("any_difference")
def test_scores_are_ranked_and_bounded(model: Model) -> None:
    result = locate_heads(model, same_length_facts())
    best = result.top(1)
    (pair,) = best
    assert float(result.scores[pair]) == float(result.scores.max())
    mean = result.interval(*pair)
    assert mean.low <= mean.mean <= mean.high and mean.n == len(result.pairs)


def test_bootstrap_resamples_groups_and_covers() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        centres = rng.normal(size=12)
        values = np.repeat(centres, 5)
        mean = bootstrap_mean(values, np.repeat(np.arange(12), 5), seed=seed, n_resamples=300)
        hits += mean.low <= 0 <= mean.high
    # 60 values that are 12 in truth: an interval over values would cover about half the time
    assert 0.85 <= hits / 200 <= 0.99
    assert math.isnan(bootstrap_mean([]).mean)


@pytest.mark.usefixtures("any_difference")
def test_public_functions_leave_the_model_as_it_was(model: Model) -> None:
    facts = same_length_facts()
    batch = make_batch(encode_facts(model, facts), model.pad_token)
    parameter = next(model.bridge.parameters())
    model.bridge.train()
    parameter.requires_grad_(False)
    try:
        with model.evaluating():
            before = model.answer_logits(batch)
        hooks = sum(len(m._forward_hooks) + len(m._backward_hooks) for m in model.bridge.modules())
        attention_entropy(model, facts)
        classify_heads(model, facts)
        temperature_response(model, facts, [2.0])
        head_selectivity(model, facts[:1], 2.0)
        locate_heads(model, facts)
        with pytest.raises(TemperatureError):
            temperature_response(model, facts, [2.0, -1.0])
        with pytest.raises(FactsError):
            locate_heads(model, facts[:1])
        assert all(module.training for module in model.bridge.modules())
        assert not parameter.requires_grad and parameter.grad is None
        assert hooks == sum(len(m._forward_hooks) + len(m._backward_hooks) for m in model.bridge.modules())
        with model.evaluating():
            assert torch.equal(before, model.answer_logits(batch))
    finally:
        model.bridge.eval()
        parameter.requires_grad_(True)


def test_a_second_model_is_not_affected() -> None:
    first, second = load_family("llama"), load_family("llama")
    batch = make_batch(encode_facts(first, facts_of(2)), first.pad_token)
    with first.evaluating(), second.evaluating():
        before = second.answer_logits(batch)
        with smoothed(first, 4.0):
            assert not torch.equal(first.answer_logits(batch), before)
            assert torch.equal(second.answer_logits(batch), before)
