"""The 25 verifiable instructions of IFEval (arXiv:2311.07911), each a small function of the answer.

Written from the paper and its published rules, so that the benchmark needs neither NLTK's downloaded data nor the
evaluation harness; ``tests/evaluation/test_ifeval.py`` compares every one with the harness's own check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from bitmtp.errors import RequestError

Check = Callable[[str, Mapping[str, Any]], bool]

_ENDINGS = re.compile(r"[.!?]+[\"'”’)\]*]*(?=\s)")
# After these, and after any single letter, a full stop does not end a sentence.
_ABBREVIATIONS = re.compile(
    r"(mrs?|ms|dr|prof|st|[js]r|vs|etc|e\.g|i\.e|inc|ltd|co|corp|no|vol|fig|gen|gov|sen|re[pv]|hon|capt|col|lt|sgt|jan|feb|mar"
    r"|apr|jun|jul|aug|sept?|oct|nov|dec|u\.s|u\.k|[ap]\.m|ph\.d|[a-z])"
)
_WORD_BREAKS = re.compile(r"[\s,;:@#$%&?!()\[\]{}<>\"“”‘`]+|--+|\.\.\.|(?='(?:[sSmMdD]|ll|LL|re|RE|ve|VE)\b)|(?=n't\b)")
_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}


def _related(count: int, relation: str, bound: int) -> bool:
    return count < bound if relation == "less than" else count >= bound


def count_sentences(text: str) -> int:
    """Sentences of an English text."""
    text, count, start = text.strip(), 0, 0
    for match in _ENDINGS.finditer(text):
        word = text[start : match.start()].split()[-1:] or [""]
        bare = word[0].strip("\"'“(*[").lower()
        if match[0].startswith(".") and _ABBREVIATIONS.fullmatch(bare):
            continue
        count, start = count + 1, match.end()
    return count + bool(text[start:].strip())


def count_capital_words(text: str) -> int:
    """Words, cut as in the Penn Treebank, whose letters are all capitals."""
    return sum(word.isupper() for word in _WORD_BREAKS.split(text))


def _language(text: str) -> str | None:
    """ISO code of a text's language; None if it has no letters to tell by."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError:
        raise RequestError("judging IFEval needs langdetect; pip install 'bitmtp[eval]'") from None
    DetectorFactory.seed = 0
    try:
        return str(detect(text))
    except LangDetectException:
        return None


def _existence(text: str, options: Mapping[str, Any]) -> bool:
    return all(re.search(word, text, re.IGNORECASE) for word in options["keywords"])


def _frequency(text: str, options: Mapping[str, Any]) -> bool:
    count = len(re.findall(options["keyword"].strip(), text, re.IGNORECASE))
    return _related(count, options["relation"], options["frequency"])


def _forbidden(text: str, options: Mapping[str, Any]) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in options["forbidden_words"])


def _letters(text: str, options: Mapping[str, Any]) -> bool:
    return _related(text.lower().count(options["letter"].lower()), options["let_relation"], options["let_frequency"])


def _response_language(text: str, options: Mapping[str, Any]) -> bool:
    return _language(text) in (options["language"], None)


def _sentences(text: str, options: Mapping[str, Any]) -> bool:
    return _related(count_sentences(text), options["relation"], options["num_sentences"])


def _words(text: str, options: Mapping[str, Any]) -> bool:
    return _related(len(re.findall(r"\w+", text)), options["relation"], options["num_words"])


def _filled(pieces: list[str]) -> int | None:
    """How many pieces hold text; None if an empty one lies between others."""
    if not all(piece.strip() for piece in pieces[1:-1]):
        return None
    return sum(bool(piece.strip()) for piece in pieces)


def _paragraphs(text: str, options: Mapping[str, Any]) -> bool:
    return bool(_filled(re.split(r"\s?\*\*\*\s?", text)) == options["num_paragraphs"])


def _first_word(text: str, options: Mapping[str, Any]) -> bool:
    pieces, place = text.split("\n\n"), options["nth_paragraph"]
    count = sum(bool(piece.strip()) for piece in pieces)
    if count != options["num_paragraphs"] or place > count or not (words := pieces[place - 1].split()):
        return False
    word = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'))[0]
    return bool(word.lower() == options["first_word"].lower())


def _placeholders(text: str, options: Mapping[str, Any]) -> bool:
    return bool(len(re.findall(r"\[.*?\]", text)) >= options["num_placeholders"])


def _postscript(text: str, options: Mapping[str, Any]) -> bool:
    marker = options["postscript_marker"]
    pattern = _POSTSCRIPTS.get(marker, rf"\s*{marker.lower()}.*$")
    return re.search(pattern, text.lower(), re.MULTILINE) is not None


def _bullets(text: str, options: Mapping[str, Any]) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return bool(len(stars) + len(dashes) == options["num_bullets"])


def _constrained(text: str, _: Mapping[str, Any]) -> bool:
    return any(choice in text for choice in _CHOICES)


def _highlights(text: str, options: Mapping[str, Any]) -> bool:
    single = [found.strip("*").strip() for found in re.findall(r"\*[^\n\*]*\*", text)]
    double = [found.removeprefix("**").removesuffix("**").strip() for found in re.findall(r"\*\*[^\n\*]*\*\*", text)]
    return bool(sum(map(bool, [*single, *double])) >= options["num_highlights"])


def _sections(text: str, options: Mapping[str, Any]) -> bool:
    pieces = re.split(rf"\s?{options['section_spliter']}\s?\d+\s?", text)
    return bool(len(pieces) - 1 >= options["num_sections"])


def _json(text: str, _: Mapping[str, Any]) -> bool:
    text = text.strip()
    for prefix in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(prefix)
    try:
        json.loads(text.removesuffix("```").strip())
    except ValueError:
        return False
    return True


def _title(text: str, _: Mapping[str, Any]) -> bool:
    return any(found.lstrip("<").rstrip(">").strip() for found in re.findall(r"<<[^\n]+>>", text))


def _two_responses(text: str, _: Mapping[str, Any]) -> bool:
    pieces = text.split("******")
    answers = [piece.strip() for piece in pieces if piece.strip()]
    return _filled(pieces) == 2 and answers[0] != answers[1]


def _repeat(text: str, options: Mapping[str, Any]) -> bool:
    return text.strip().lower().startswith(options["prompt_to_repeat"].strip().lower())


def _ending(text: str, options: Mapping[str, Any]) -> bool:
    return text.strip().strip('"').lower().endswith(options["end_phrase"].strip().lower())


def _quotation(text: str, _: Mapping[str, Any]) -> bool:
    text = text.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def _capital_words(text: str, options: Mapping[str, Any]) -> bool:
    return _related(count_capital_words(text), options["capital_relation"], options["capital_frequency"])


def _capitals(text: str, _: Mapping[str, Any]) -> bool:
    return text.isupper() and _language(text) in ("en", None)


def _small_letters(text: str, _: Mapping[str, Any]) -> bool:
    return text.islower() and _language(text) in ("en", None)


def _no_comma(text: str, _: Mapping[str, Any]) -> bool:
    return "," not in text


CHECKS: Mapping[str, Check] = {
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _capitals,
    "change_case:english_lowercase": _small_letters,
    "combination:repeat_prompt": _repeat,
    "combination:two_responses": _two_responses,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:json_format": _json,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:title": _title,
    "keywords:existence": _existence,
    "keywords:forbidden_words": _forbidden,
    "keywords:frequency": _frequency,
    "keywords:letter_frequency": _letters,
    "language:response_language": _response_language,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_words": _words,
    "punctuation:no_comma": _no_comma,
    "startend:end_checker": _ending,
    "startend:quotation": _quotation,
}
