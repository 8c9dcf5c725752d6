"""The instructions of IFEval, against the harness's own checks and by hand."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bitmtp.evaluation.instructions import CHECKS, count_capital_words, count_sentences
from bitmtp.evaluation.tasks import TASKS

OPTIONS: Mapping[str, dict[str, Any]] = {
    "combination:repeat_prompt": {"prompt_to_repeat": "Say it again."},
    "detectable_content:number_placeholders": {"num_placeholders": 2},
    "detectable_content:postscript": {"postscript_marker": "P.P.S"},
    "detectable_format:multiple_sections": {"section_spliter": "PART", "num_sections": 2},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "detectable_format:number_highlighted_sections": {"num_highlights": 2},
    "keywords:existence": {"keywords": ["cat", "dog"]},
    "keywords:forbidden_words": {"forbidden_words": ["cat"]},
    "keywords:frequency": {"keyword": "cat", "frequency": 2, "relation": "less than"},
    "keywords:letter_frequency": {"letter": "c", "let_frequency": 3, "let_relation": "at least"},
    "language:response_language": {"language": "de"},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "dogs"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 2},
    "length_constraints:number_words": {"num_words": 8, "relation": "at least"},
    "startend:end_checker": {"end_phrase": "The end."},
}
PIECES = (
    "Say it again.", "The cat sat, and the dogs slept.", "Dogs' ears!", "THE CAT.", "a cat and a dog.", "\n\n",
    "\n***\n", "\n", "[name]", "[a] and [b]", "P.P.S. bye", "P.S. bye", "PART 1", "PART 2", "* one", "\n* two\n- three",
    "*bold*", "**strong** *a*", "<<Title>>", "<< >>", "******", "My answer is yes.", '{"a": 1}', "```json\n[1]\n```",
    "Die Katze schläft auf dem Sofa.", '"', "'Dogs", "dogs, too", "The end.", "THE END.", '"A cat."',
)  # fmt: skip


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    """The harness's instructions; it looks for NLTK's data when imported, which these tests do without."""
    nltk = pytest.importorskip("nltk", reason="pip install 'bitmtp[harness]'")
    pytest.importorskip("lm_eval", reason="pip install 'bitmtp[harness]'")
    pytest.importorskip("langdetect", reason="pip install 'bitmtp[eval]'")
    folder = tmp_path_factory.mktemp("nltk")
    (folder / "tokenizers" / "punkt_tab").mkdir(parents=True)
    nltk.data.path.append(str(folder))
    yield importlib.import_module("lm_eval.tasks.ifeval.instructions_registry").INSTRUCTION_DICT
    nltk.data.path.remove(str(folder))


def _answers(seed: str) -> list[str]:
    random_ = random.Random(seed)
    alone = [*PIECES, *(piece.upper() for piece in PIECES), *(piece.lower() for piece in PIECES)]
    return [*alone, *(" ".join(random_.choices(PIECES, k=random_.randint(2, 7))) for _ in range(300))]


@pytest.mark.parametrize("name", sorted(set(CHECKS) - {"length_constraints:number_sentences"}))
def test_as_the_harness(registry: Mapping[str, Any], name: str) -> None:
    options, known = OPTIONS.get(name, {}), set()
    if name == "change_case:capital_word_frequency":
        pytest.skip("the harness needs NLTK's data for it; counted by hand below")
    theirs = registry[name](name)
    theirs.build_description(**options)
    for answer in filter(str.strip, _answers(name)):
        verdict = bool(theirs.check_following(answer))
        assert CHECKS[name](answer, options) == verdict, answer
        known.add(verdict)
    assert known == {True, False}  # the answers tell the two apart


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("No end", 1),
        ("", 0),
        ("Dr. Lee met J. Smith, e.g. at noon. They left.", 2),
        ('"Stop!" she said. "Why?" he asked.', 4),
        ("It costs 3.50 today.\n\nYes.", 2),
        ("What?! No...", 2),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [("I saw NASA, and the U.S. (TWICE)!", 4), ("none here", 0), ("I'M HERE - OK?", 4), ("A-B c", 1), ("X1 12", 1)],
)
def test_capital_words(text: str, count: int) -> None:
    assert count_capital_words(text) == count


def test_every_instruction_counts(data: Path) -> None:
    first, second = TASKS["ifeval"].questions(data)
    judge = TASKS["ifeval"].judge
    assert judge(first, "No commas here").right
    assert judge(first, "One, two").note == "punctuation:no_comma"
    assert judge(second, '"Four words in all"').right
    assert not judge(second, '"Two words"').right
    assert not judge(second, "").right


def test_a_frame_is_forgiven(data: Path) -> None:
    question = TASKS["ifeval"].questions(data)[1]
    framed = 'Here it is:\n"Four words in all"\n*'
    verdict = TASKS["ifeval"].judge(question, framed)
    assert not verdict.right
    assert verdict.lenient
    assert not TASKS["ifeval"].judge(question, "Two words").lenient
