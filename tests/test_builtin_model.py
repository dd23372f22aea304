"""The real small model: what the random ones cannot show."""

from __future__ import annotations

import pytest
import torch

import asu_interp as asu
from asu_interp.data.batches import encode_facts, make_batch
from asu_interp.data.facts import FactSet
from asu_interp.lens.patching import make_pairs
from asu_interp.models import Model


@pytest.fixture(scope="module")
def model() -> Model:
    return asu.load_model("smollm2-135m")


@pytest.fixture(scope="module")
def facts(model: Model) -> FactSet:
    return asu.load_facts("demo:capital/Asia[0:8,0:16]").known_to(model)


def test_it_passes_its_checks_and_knows_capitals(model: Model, facts: FactSet) -> None:
    assert all(check.passed for check in model.checks)
    assert (model.n_layers, model.n_heads, model.bridge.cfg.n_key_value_heads) == (30, 9, 3)
    assert len(facts.forget) >= 6 and len(facts.retain) >= 10 and len(facts.neighbours) >= 10
    said = model.generate(["What is the capital of Japan?"], ["The capital of Japan is"], max_new_tokens=4)
    assert said[0].strip().startswith("Tokyo")


def test_smoothing_hits_the_facts_and_is_gone_afterwards(model: Model, facts: FactSet) -> None:
    batch = make_batch(encode_facts(model, facts.forget), model.pad_token)
    with model.evaluating():
        before = model.answer_logits(batch)
    result = asu.temperature_response(model, facts.forget, [1.0, 2.5])
    assert (result.entropy[1] >= result.entropy[0] - 1e-6).float().mean() > 0.9  # inputs of later layers change too
    assert result.entropy[1].mean() > result.entropy[0].mean() + 0.3
    assert result.by_class["factual"]["lost"][1].mean > 0.3
    with model.evaluating():
        assert torch.equal(before, model.answer_logits(batch))


def test_one_patched_head_equals_a_hook_written_by_hand(model: Model, facts: FactSet) -> None:
    result = asu.locate_heads(model, facts.forget, max_pairs=1)
    pair = make_pairs(model, facts.forget, facts.forget)[0][0]
    layer, head = max(result.top(5), key=lambda where: float(result.scores[where]))
    with model.evaluating():
        clean = pair.metric(model.bridge(pair.clean[None])[0, -1])
        corrupted = pair.metric(model.bridge(pair.corrupted[None])[0, -1])
        _, cache = model.bridge.run_with_cache(pair.clean[None])
        name = f"blocks.{layer}.attn.hook_z"

        def patch(z: torch.Tensor, hook: object) -> torch.Tensor:
            z[:, :, head] = cache[name][:, :, head]
            return z

        patched = pair.metric(model.bridge.run_with_hooks(pair.corrupted[None], fwd_hooks=[(name, patch)])[0, -1])
    assert float(result.scores[layer, head]) == pytest.approx(
        float((patched - corrupted) / (clean - corrupted)), abs=1e-4
    )
    assert float(result.scores[layer, head]) > 0.1  # some single head brings a good part of the answer back


def test_a_few_steps_forget_and_keep(model: Model, facts: FactSet) -> None:
    fingerprint = model.fingerprint()
    few = FactSet("few", facts.forget[:3], facts.retain[:6])
    run = asu.unlearn(model, few, tau=4.0, epochs=8, learning_rate=5e-5, progress=False)
    first, last = run.log[0], run.log[-1]
    assert last["forget_loss"] < 0.5 * first["forget_loss"]
    assert last["retain_nll"] < first["retain_nll"] + 0.5
    assert model.fingerprint() == fingerprint
