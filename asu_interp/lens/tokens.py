"""Which answer tokens are factual and which functional (arXiv 2603.01285).

The rule needs no model: a word is functional if it belongs to a closed class of English, punctuation and
special tokens are functional, and everything else is factual. docs/token_classes.md states it in full, with
its measured precision and recall.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # character offsets [start, end)

# Words that are as often content ("given", "following", "past", "need") are left out: open class wins.
_CLOSED_CLASSES = {
    "articles": "a an the",
    # Numerals stay factual, except "one", which is nearly always a pronoun ("one of", "no one").
    "pronouns": """
        i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its
        itself we us our ours ourselves they them their theirs themselves themself one ones oneself someone
        somebody something anyone anybody anything everyone everybody everything nobody nothing none""",
    "determiners": """
        this that these those such same own some any no every each either neither both all other
        others another many much more most few fewer fewest less least several various numerous
        multiple enough lot lots""",
    "prepositions": """
        about above across after against along alongside amid amidst among amongst around as at atop
        before behind below beneath beside besides between beyond by concerning despite down due
        during except for from in including inside into like near of off on onto out outside over per
        regarding since than through throughout till to toward towards under underneath unlike until
        unto up upon versus via vs with within without according""",
    "conjunctions": """
        and or but nor so yet although though while whilst whereas because if unless whether lest & e.g. i.e.
        etc""",
    "auxiliaries": """
        be am is are was were been being have has had having do does did done doing ain't can could may might
        must shall should will would ought cannot can't won't shan't let's""",
    "wh-words": """
        who whom whose which what when where why how whoever whomever whatever whichever whenever wherever""",
    "adverbs": """
        not never ever also too very quite rather just only even still already again always often sometimes
        almost perhaps maybe likely however therefore thus hence then there here now once instead else
        otherwise moreover furthermore further nevertheless nonetheless meanwhile together apart away aside
        forth well""",
    "answer openers": "yes no okay ok indeed absolutely certainly definitely surely sure",
}
_CLOSED = frozenset(word for words in _CLOSED_CLASSES.values() for word in words.split())
_CLITIC = re.compile(r"(?:n't|'(?:s|re|ve|d|ll|m))+$")  # doesn't, who'll, it's
_JOINT = re.compile(r"[-‐‑/.&]")  # and/or, in-between: closed if every part is

# Matched on the shape of a text, see _kind: letters are "a", digits "0", wide letters (Chinese and such) "W".
_WORD = re.compile(
    r"""(?:a{1,2}\.){2,}(?![a0])                                     # U.S., Ph.D., e.g.
      | W
      | [$€£¥₹\#]? [a0]+                                             # $5, #7
        (?: (?: [-‐‑'’./&\u200c\u200d] | (?<=0)[,:](?=0) ) [a0]+ )*  # Al-Kuwaiti's, 05/25/1930, 1,000, 12:30
        [%‰°$€£¥₹+\#]*                                               # 20%, LGBTQ+
      | &""",
    re.VERBOSE,
)
_QUOTED = re.compile(r"""["“][^"”\n]+["”]|«[^»\n]+»|(?<!\w)['‘][^\n]+?['’](?!\w)""")
_SENTENCE_START = re.compile(r"""[.!?…:\n"“”«»'‘’]""")  # an opening quote starts one too


def factual_spans(text: str) -> list[Span]:
    """Spans of the factual words of an English text by the default rule, in order.

    Source: the split of arXiv 2603.01285; the rule is ours (docs/token_classes.md).
    """
    words = _words(text)
    capital = _capitals(text, words)
    links = _name_links(text, words, capital)
    titles = _quoted_titles(text, words)
    return [
        span
        for i, span in enumerate(words)
        if capital[i] or i in links or not _is_closed(text[slice(*span)]) or _overlaps(span, titles)
    ]


def tokens_in_spans(offsets: Sequence[Span], spans: Sequence[Span], text: str) -> list[bool]:
    """True for each token that overlaps a span, white space at its edges aside, [n_tokens].

    `offsets` [n_tokens] and `spans` are character ranges in `text`. Special tokens have empty offsets: False.
    """
    return [_overlaps(_trimmed(text, token), spans) for token in offsets]


def check_spans(text: str, spans: Sequence[Span], offsets: Sequence[Span] | None = None) -> None:
    """Check that user-marked spans lie in the text, hold something, are disjoint and mark whole words only.

    With the tokens' `offsets` [n_tokens], no token may hold both a marked and an unmarked word.
    Raises ValueError that names the span and what to mark instead.
    """
    for start, end in spans:
        if not 0 <= start <= end <= len(text):
            raise ValueError(f"span ({start}, {end}) is out of range: the text has characters 0-{len(text)}")
        if not text[start:end].strip():
            raise ValueError(f"span ({start}, {end}) is empty: it marks {text[start:end]!r}")
    ordered = sorted(spans)
    for left, right in pairwise(ordered):
        if right[0] < left[1]:
            raise ValueError(f"spans {left} and {right} overlap: mark every character once")
    words = _words(text)
    for span in spans:
        _check_whole_words(text, span, words)
    marked = [_overlaps(word, spans) for word in words]
    for token in offsets or ():
        if len({mark for word, mark in zip(words, marked, strict=True) if _overlaps(word, [token])}) > 1:
            held = text[slice(*token)]
            raise ValueError(f"token {token} {held!r} holds a marked and an unmarked word: mark both")


def classify_answer(
    tokenizer: PreTrainedTokenizerBase,
    answer: str,
    answer_ids: Sequence[int],
    *,
    spans: Sequence[Span] | None = None,
    rule: Callable[[str], Sequence[Span]] | None = None,
) -> list[bool]:
    """True for each factual token of an answer, False for each functional one, [n_tokens].

    `answer_ids` are the ids of " " + answer as the model sees them, an end token included or not. The factual
    words are `spans` (character ranges in `answer`), else what `rule(answer)` returns, else
    `factual_spans(answer)`. Raises ValueError if the ids do not decode to the answer, or if the spans fail
    `check_spans`.
    Source: arXiv 2603.01285.
    """
    offsets = _token_offsets(tokenizer, answer, answer_ids)
    chosen = rule(answer) if spans is None and rule is not None else spans
    if chosen is None:
        return tokens_in_spans(offsets, factual_spans(answer), answer)
    check_spans(answer, chosen, offsets)
    return tokens_in_spans(offsets, chosen, answer)


def _kind(char: str) -> str:
    """The character's sign in a text's shape: combining marks are letters, symbols stand for themselves."""
    category = unicodedata.category(char)[0]
    if category == "L" and unicodedata.east_asian_width(char) == "W":
        return "W"
    return {"L": "a", "M": "a", "N": "0"}.get(category, char)


def _words(text: str) -> list[Span]:
    return [match.span() for match in _WORD.finditer("".join(map(_kind, text)))]


def _is_closed(word: str) -> bool:
    word = word.casefold().replace("’", "'")
    parts = [word] if word in _CLOSED else _JOINT.split(word)
    return all(part in _CLOSED or _CLITIC.sub("", part) in _CLOSED for part in parts)


def _capitals(text: str, words: list[Span]) -> list[bool]:
    """Which words have a capital that marks a name: one inside a sentence, or all capitals (US, WHO)."""
    previous_ends = [0, *(end for _, end in words)]
    return [
        (len(word := text[start:end]) > 1 and word.isupper())
        or (
            word[0].isupper()
            and not re.match(r"I\b", word)
            and before > 0
            and not _SENTENCE_START.search(text, before, start)
        )
        for before, (start, end) in zip(previous_ends, words, strict=False)
    ]


def _name_links(text: str, words: list[Span], capital: list[bool]) -> set[int]:
    """Indices of the small words between two capitalised ones: Book *of the* Year, Award *for* Literature."""
    plain = [text[start:end] for start, end in words]
    links: set[int] = set()
    for i, word in enumerate(plain[1:], start=1):
        right = i + 1 + (plain[i + 1 : i + 2] == ["the"])
        if word in ("of", "for") and right < len(words) and capital[i - 1] and capital[right]:
            between = text[words[i - 1][1] : words[right][0]]
            links.update(range(i, right) if between.replace(" ", "").isalpha() else ())
    return links


def _quoted_titles(text: str, words: list[Span]) -> list[Span]:
    """Quotations most of whose open-class words are capitalised (or numbers): titles, not speech."""
    titles = []
    for quotation in _QUOTED.finditer(text):
        inside = [text[slice(*word)] for word in words if _overlaps(word, [quotation.span()])]
        telling = [word for word in inside if not _is_closed(word)] or inside
        if 2 * sum(not word[0].islower() for word in telling) > len(telling):
            titles.append(quotation.span())
    return titles


def _overlaps(span: Span, others: Sequence[Span]) -> bool:
    return any(max(span[0], start) < min(span[1], end) for start, end in others)


def _trimmed(text: str, span: Span) -> Span:
    """The span without white space at its edges."""
    inner = text[slice(*span)]
    start = span[0] + len(inner) - len(inner.lstrip())
    return start, start + len(inner.strip())


def _check_whole_words(text: str, span: Span, words: list[Span]) -> None:
    for start, end in words:
        if any(start < edge < end for edge in span):
            marked, word = text[slice(*span)], text[start:end]
            raise ValueError(f"span {span} {marked!r} cuts the word {word!r} ({start}, {end}): mark it whole")


def _token_offsets(tokenizer: PreTrainedTokenizerBase, answer: str, answer_ids: Sequence[int]) -> list[Span]:
    """Each token's characters in the answer, [n_tokens], from decoding ever longer prefixes of the ids."""
    ids = list(answer_ids)
    prefixes = [_decode(tokenizer, ids[:n]) for n in range(len(ids) + 1)]
    text = prefixes[-1]
    if text not in (answer, " " + answer):
        raise ValueError(f"the ids decode to {text!r}, not to the answer {answer!r}: wrong tokenizer?")
    lead = len(text) - len(answer)
    offsets = []
    done = 0
    for prefix in prefixes[1:]:
        # An unfinished character shows as U+FFFD. Each token that brings some of its bytes covers it.
        shown = prefix if text.startswith(prefix) else prefix.rstrip("\ufffd")
        if not text.startswith(shown):
            raise ValueError(f"the first ids decode to {prefix!r}, with which {text!r} does not begin")
        # max: with a byte fallback, finished characters just before an unfinished one turn into U+FFFD again
        whole = max(done, len(shown))
        offsets.append((max(done - lead, 0), max(whole + (len(prefix) > whole) - lead, 0)))
        done = whole
    return offsets


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
