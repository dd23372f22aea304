"""Encoding and batching against the slow obvious way of doing it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import CONTEXT, load_family, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from asu_interp.data import Fact
from asu_interp.data.batches import Batch, Encoded, batches, encode_facts, encode_texts, make_batch
from asu_interp.errors import FactsError, ModelError
from asu_interp.models import Model
from asu_interp.models.template import Template

FACTS = [
    Fact("The capital of the island is", "on the coast."),
    Fact("Where?", "North"),
    Fact("What is on the coast in the north of the island?", "The capital, and it was."),
]
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    "{{ '[bot]' if add_generation_prompt }}"
)

# Ids of any kind, padding's and the end token's 0 among them, everywhere.
ids = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple)
sequences = st.lists(st.builds(Encoded, ids, ids), min_size=1, max_size=8)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Model:
    return load_family(request.param)


def wrapped(template: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer, putting special tokens around a text: "<end> $A" or "$A <end>"."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, bos_token="<end>", eos_token="<end>", pad_token="<end>"
    )
    own = tokenizer.backend_tokenizer
    own.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<end>", 0)])
    return tokenizer


def rows_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """(unpadded tokens, answer tokens) of each row, read off the two masks alone."""
    return [
        (row[mask.bool()].tolist(), row[answer].tolist())
        for row, mask, answer in zip(batch.tokens, batch.attention_mask, batch.answer, strict=True)
    ]


# ---- batches ------------------------------------------------------------------------------------


@given(sequences)
def test_masks_come_from_lengths_whatever_the_ids(sequences):
    batch = make_batch(sequences, pad_token=0)
    assert rows_of(batch) == [([*s.prompt, *s.answer], [*s.answer]) for s in sequences]
    assert batch.tokens.shape == (len(sequences), max(len(s) for s in sequences))
    assert batch.tokens[batch.attention_mask == 0].eq(0).all()


@given(sequences)
def test_targets_reads_and_rows_against_loops(sequences):
    batch = make_batch(sequences, pad_token=0)
    targets, places, rows = [], [], []
    for row, s in enumerate(sequences):
        for position in range(len(s.prompt), len(s)):
            targets.append((s.prompt + s.answer)[position])
            places.append([row, position - 1])
            rows.append(row)
    assert batch.targets.tolist() == targets
    assert batch.reads.nonzero().tolist() == places
    assert batch.token_row.tolist() == rows


@settings(max_examples=50)
@given(sequences, st.integers(1, 9))
def test_batches_hold_every_sequence_once_and_index_restores_the_order(sequences, size):
    restored: dict[int, tuple[list[int], list[int]]] = {}
    widths = []
    for batch in batches(sequences, pad_token=0, size=size):
        assert 1 <= len(batch.index) <= size
        for i, row in zip(batch.index.tolist(), rows_of(batch), strict=True):
            assert i not in restored
            restored[i] = row
        widths.append(batch.tokens.shape[1])
    assert [restored[i] for i in range(len(sequences))] == [([*s.prompt, *s.answer], [*s.answer]) for s in sequences]
    assert widths == sorted(widths)


def test_no_sequences_no_batches():
    assert list(batches([], pad_token=0)) == []


def test_a_batch_moves_whole():
    batch = make_batch([Encoded((1,), (2,)), Encoded((1, 1), (2, 2))], pad_token=0, index=[5, 3])
    moved = batch.to(torch.device("meta"))
    assert {t.device.type for t in (moved.tokens, moved.attention_mask, moved.answer, moved.index)} == {"meta"}
    assert batch.index.tolist() == [5, 3]


def test_end_token_counts_and_padding_of_the_same_id_does_not(model):
    assert model.pad_token == model.end_token == 0
    encoded = encode_facts(model, FACTS)
    batch = make_batch(encoded, model.pad_token)
    assert (batch.attention_mask == 0).any()
    for s, answer in zip(encoded, batch.answer, strict=True):
        assert s.answer[-1] == 0 and s.answer.count(0) == 1
        assert int(answer.sum()) == len(s.answer)


def test_answer_logits_are_those_of_each_sequence_alone(model):
    encoded = encode_facts(model, FACTS)
    batch = make_batch(encoded, model.pad_token)
    with model.evaluating():
        together = model.answer_logits(batch)
        alone = torch.cat([one_by_one(model, s) for s in encoded])
    assert together.shape == (len(batch.targets), alone.shape[1])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def one_by_one(model: Model, sequence: Encoded) -> Tensor:
    tokens = torch.tensor([sequence.prompt + sequence.answer])
    return model.hf(tokens, use_cache=False).logits[0, len(sequence.prompt) - 1 : -1]


# ---- encoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "prompt", "text"),
    [
        ("bare", "Where is it?", "Where is it? On the coast."),
        ("qa", "Question: Where is it?\nAnswer:", "Question: Where is it?\nAnswer: On the coast."),
        ("chat", "<end>[user]Where is it?[/][bot]", "<end>[user]Where is it?[/][bot]On the coast."),
    ],
)
def test_templates(model, template, prompt, text):
    tokenizer = wrapped("<end> $A")
    tokenizer.chat_template = CHAT
    model = replace(model, template=Template(template), tokenizer=tokenizer)
    prompt_ids, answer_ids = model.encode("Where is it?", "On the coast.")
    assert prompt_ids.count(0) == 1 and prompt_ids[0] == 0  # one beginning, not two, in a chat either
    assert tokenizer.decode(prompt_ids).removeprefix("<end>") == prompt.removeprefix("<end>")
    assert answer_ids[-1] == 0
    assert tokenizer.decode(prompt_ids[1:] + answer_ids[:-1]) == text.removeprefix("<end>")


def test_chat_without_a_chat_template(model):
    with pytest.raises(ModelError, match="has no chat template"):
        replace(model, template=Template("chat")).encode("Where?", "North")
    with pytest.raises(ModelError, match="allowed are bare, qa, chat"):
        Template("alpaca")


def test_prompt_and_answer_are_the_joined_text(model):
    prompt_ids, answer_ids = model.encode("The capital is", "on the coast")
    joined = model.tokenizer("The capital is on the coast", add_special_tokens=False).input_ids
    assert prompt_ids + answer_ids == [*joined, model.end_token]
    assert model.encode("The capital is", "on the coast", end=False) == (prompt_ids, answer_ids[:-1])
    assert model.encode("The capital is") == (prompt_ids, [])


def test_answer_that_would_merge_into_the_prompt_is_encoded_alone(model):
    tokenizer = wrapped("$A")
    tokenizer.chat_template = "{{ messages[0].content }}"
    model = replace(model, template=Template("chat"), tokenizer=tokenizer)
    prompt_ids, answer_ids = model.encode("on the coa", "st", end=False)
    joined = tokenizer("on the coast", add_special_tokens=False).input_ids
    assert joined[: len(prompt_ids)] != prompt_ids  # else this tests nothing
    assert tokenizer.decode(prompt_ids) == "on the coa"
    assert tokenizer.decode(answer_ids) == "st"


def test_tokenizer_that_ends_every_text(model):
    plain = model.encode("Where is it?", "On the coast.")
    assert replace(model, tokenizer=wrapped("$A <end>")).encode("Where is it?", "On the coast.") == plain


def test_tokenizer_without_an_end_token(model):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    model = replace(model, tokenizer=tokenizer)
    with_end, without = model.encode("Where?", "North"), model.encode("Where?", "North", end=False)
    assert model.end_token is None and with_end == without
    assert model.pad_token == 0


def test_prompt_without_tokens(model):
    for tokenizer in (model.tokenizer, wrapped("$A <end>")):
        with pytest.raises(FactsError, match='prompt "": no tokens'):
            replace(model, tokenizer=tokenizer).encode("", "North")


def test_empty_answers():
    for answer in ("", "  \n"):
        with pytest.raises(FactsError, match=r'answer of "Where\?": is empty'):
            Fact("Where?", answer)


def test_answer_that_the_tokenizer_drops(model):
    tokenizer = wrapped("$A")
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(FactsError, match='answer "東" to "Where": no tokens'):
        replace(model, template=Template("chat"), tokenizer=tokenizer).encode("Where", "東")


def test_facts_longer_than_the_context(model):
    room = CONTEXT - len(model.encode("Where?", "x")[0]) - 1  # one token is the end
    fits = " ".join("x" for _ in range(CONTEXT))
    longest = next(fits[:n] for n in range(len(fits), 0, -1) if tokens_of(model, fits[:n]) <= room)
    assert tokens_of(model, longest) == room
    (encoded,) = encode_facts(model, [Fact("Where?", longest)])
    assert len(encoded) == CONTEXT
    with pytest.raises(FactsError, match=f"{CONTEXT + 1} tokens, this model reads at most {CONTEXT}"):
        encode_facts(model, [FACTS[0], Fact("Where?", longest + "x")])


def tokens_of(model: Model, answer: str) -> int:
    return len(model.encode("Where?", answer[:1])[1]) - 2 + len(model.tokenizer(answer).input_ids)


def test_free_text_scores_all_but_its_first_token(model):
    text = "The capital is on the coast."
    (encoded,) = encode_texts(model, [text])
    assert [*encoded.prompt, *encoded.answer] == model.tokenizer(text).input_ids
    assert len(encoded.prompt) == 1


def test_free_text_too_short_or_too_long(model):
    with pytest.raises(FactsError, match=f'text "x": 1 tokens; 2 to {CONTEXT} are allowed'):
        encode_texts(model, ["The capital", "x"])
    with pytest.raises(FactsError, match=f"{CONTEXT + 1} tokens"):
        encode_texts(model, ["x" * (CONTEXT + 1)])
