"""Metrics of LongBench and InfiniteBench: scores in [0, 1] of a prediction against a right answer.

Libraries compute official figures where they can: rouge-score for summaries of books, difflib for code. LongBench's
ROUGE-L is that of the package rouge 1.0.1, which counts distinct words sentence by sentence, as no other package does.
It and all other metrics are implemented here from their definitions.
`tests/golden/metrics` has scores of the official functions.
"""

import difflib
import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟"
    "〰〾〿–—‘’‛“”„‟…‧﹏."
)
_CHINESE_TOO = str.maketrans("", "", string.punctuation + _CHINESE)
_MARKS = "\n:\"'.,?!{}"
LETTERS = "ABCD"
# 3.5, 17,000 and 1.2.3 are one number each; 1,2,3 are three.
_NUMBER = re.compile(r"\d+(?:,\d{3}(?!\d))*(?:\.\d+)*")
PARAGRAPH = re.compile(r"Paragraph (\d+)")


def split_normalised_words(text: str) -> list[str]:
    """List a text's words in lower case, without ASCII punctuation and the articles "a", "an" and "the"."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(said: Sequence[str], right: Sequence[str]) -> float:
    """F1 in [0, 1] of two sequences of words or characters: twice the common ones over the sum of the lengths."""
    common = (Counter(said) & Counter(right)).total()
    return 2 * common / max(1, len(said) + len(right))


def answer_f1(prediction: str, answer: str) -> float:
    """F1 of the words that prediction and answer share, in [0, 1], without case, punctuation and articles (SQuAD)."""
    return f1(split_normalised_words(prediction), split_normalised_words(answer))


def contains_answer(prediction: str, answer: str) -> float:
    """Return 1.0 if the answer occurs in the prediction, ignoring case, and not inside a word or number, else 0.0.

    Runs of spaces and line ends count as one space. Words of scripts without case, such as Chinese, may touch others.
    """
    return float(_find_whole_phrase(_normalise_text(prediction), _normalise_text(answer)) >= 0)


def _normalise_text(text: str) -> str:
    """Case-fold a text, normalise it to Unicode NFC, strip it, and replace each run of whitespace by one space."""
    return " ".join(unicodedata.normalize("NFC", text.casefold()).split())


def _find_whole_phrase(said: str, right: str) -> int:
    """Return the first index at which `right` occurs in `said`, not inside a word or number; -1 if none."""
    inside = {
        at for number in _NUMBER.finditer(said) for at in range(number.start() + 1, number.end())
    }
    at = said.find(right)
    while right and at >= 0:
        end = at + len(right)
        joined = (at > 0 and _is_within_word(said[at - 1], right[0])) or (
            end < len(said) and _is_within_word(right[-1], said[end])
        )
        if not joined and inside.isdisjoint((at, end)):
            return at
        at = said.find(right, at + 1)
    return -1


def _is_within_word(left: str, right: str) -> bool:
    """True if two neighbouring characters belong to one word or number: each is a digit or a letter with case."""
    return all(each.isdigit() or each.lower() != each.upper() for each in (left, right))


def exact_match(prediction: str, answer: str) -> float:
    """Return 1.0 if prediction and answer have the same words in order, without case, punctuation, articles; else 0."""
    said = split_normalised_words(prediction)
    right = split_normalised_words(answer)
    # An answer of only articles or signs has no words.
    return (
        float(said == right)
        if right
        else float(prediction.strip().casefold() == answer.strip().casefold())
    )


def score_choice(prediction: str, choices: Sequence[str], right: int) -> float:
    """Return 1.0 if the prediction names choice number `right` (0 is A), by its letter or its text, else 0.0.

    A letter at the beginning ("B", "B.", "(b)", "B is right") has priority, then a letter after "answer is" or
    "answer:". Otherwise the choice whose text occurs first counts, the longest of those at the same place.
    """
    last = chr(ord("A") + len(choices) - 1)
    letter = rf"\W*([A-{last}])(?![^\W_])"
    # "A cat" starts with an article; an explanation may follow on the next line.
    found = re.match(letter + r"(?![^\S\r\n]+(?!is\b)[^\W\d_])", prediction, re.IGNORECASE)
    found = found or re.search(rf"\banswer(?: is)?\b{letter}", prediction, re.IGNORECASE)
    if found is not None:
        return float(ord(found[1].upper()) - ord("A") == right)
    said = _normalise_text(prediction)
    texts = [_normalise_text(each) for each in choices]
    places = [
        (at, -len(each), number)
        for number, each in enumerate(texts)
        if (at := _find_whole_phrase(said, each)) >= 0
    ]
    return float(bool(places) and min(places)[2] == right)


def chinese_f1(prediction: str, answer: str) -> float:
    """F1 of the characters that prediction and answer share, in [0, 1]; case, spaces and punctuation do not count."""
    said, right = (
        "".join(each.lower().translate(_CHINESE_TOO).split()) for each in (prediction, answer)
    )
    return f1(said, right)


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L F1 of a summary, in [0, 1], as in the package rouge 1.0.1; 0 if either text is empty.

    Sentences end at full stops. For each sentence of the answer, the distinct words on a longest common subsequence
    with any sentence of the prediction count, once in total, as shares of both texts' distinct words (Lin, ROUGE,
    2004, section 3.2, summary level).
    """
    said = _split_at_full_stops(prediction)
    right = _split_at_full_stops(answer)
    if not said or not right:
        return 0.0
    common = {
        word
        for theirs in right
        for ours in said
        for word in _find_longest_common_subsequence(theirs, ours)
    }
    precision, recall = (
        len(common) / len({word for each in of for word in each}) for of in (said, right)
    )
    return 2 * precision * recall / (precision + recall + 1e-8)


def _split_at_full_stops(text: str) -> list[list[str]]:
    """Split a text at full stops into sentences, each a list of its words."""
    # A sentence of only spaces has one empty word, as in the package.
    return [" ".join(each.split()).split(" ") for each in text.split(".") if each]


def _find_longest_common_subsequence(right: list[str], said: list[str]) -> list[str]:
    """List the words of two sentences' longest common subsequence, last word first; ties as in the package rouge."""
    table = [[0] * (len(said) + 1)]
    for mine in right:
        above = table[-1]
        row = [0]
        for column, theirs in enumerate(said):
            row.append(above[column] + 1 if mine == theirs else max(above[column + 1], row[column]))
        table.append(row)
    at = len(right)
    to = len(said)
    found = []
    while at and to:
        if right[at - 1] == said[to - 1]:
            found.append(right[at - 1])
            at = at - 1
            to = to - 1
        elif table[at - 1][to] > table[at][to - 1]:
            at -= 1
        else:
            to -= 1
    return found


def rouge_l_of_lines(prediction: str, answer: str) -> float:
    """ROUGE-Lsum F1, in [0, 1], from package rouge-score: no stemming, each line a sentence; needs `jaxkv[eval]`."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ImportError("this metric needs rouge-score: pip install 'jaxkv[eval]'") from None
    return float(
        RougeScorer(["rougeLsum"], use_stemmer=False)
        .score(answer, prediction)["rougeLsum"]
        .fmeasure
    )


def one_class(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Return 1 / n if a prediction's n classes include the answer, else 0; names in the answer rarely count."""
    named = [each for each in classes if each in prediction]
    # As in the official code: removal during iteration skips the element after each removed one.
    for each in named:
        if each in answer and each != answer:
            named.remove(each)
    return 1.0 / len(named) if answer in named else 0.0


def share_of_numbers(prediction: str, number: str) -> float:
    """Share in [0, 1] of the prediction's numbers (runs of digits) that equal `number`; 0 without numbers."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def paragraph(prediction: str, answer: str) -> float:
    """Share in [0, 1] of the prediction's numbers that equal the number in an answer such as "Paragraph 7"."""
    return share_of_numbers(prediction, PARAGRAPH.findall(answer)[0])


def line_of_code(prediction: str, answer: str) -> float:
    """Difflib ratio, to two decimals, of the answer and the prediction's first line that has no backtick, "#" or "//".

    This is fuzzywuzzy's ratio without python-Levenshtein, which LongBench does not require: difflib's ratio, rounded to
    hundredths. RapidFuzz computes another ratio, by edit distance.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((each for each in lines if not any(mark in each for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def first_number(prediction: str, answer: str) -> float:
    """Return 1.0 if the first run of digits in the prediction equals the answer as text, else 0.0."""
    found = re.search(r"[0-9]+", prediction)
    return float(answer == (found.group() if found else ""))


def among_words(prediction: str, answer: str) -> float:
    """Return 1.0 if the answer is one of the prediction's words, split at spaces and punctuation, else 0.0."""
    return float(answer in _replace_with_spaces(prediction, _MARKS).split())


def among_names(prediction: str, answer: str) -> float:
    """Return 1.0 if the answer, which must be upper case, is a word of the prediction put in upper case, else 0.0."""
    return among_words(prediction.strip().upper(), answer)


def last_number(prediction: str, answer: str) -> float:
    """Return 1.0 if the prediction's last word is the integer that the answer gives as JSON, else 0.0."""
    words = _replace_with_spaces(prediction.strip(), "\n.`'\":").split()
    return float(_parse_integer(words[-1]) == json.loads(answer)) if words else 0.0


def found_number(prediction: str, answer: str) -> float:
    """Return 1.0 if the prediction's first number equals the number that the answer gives as JSON, else 0.0.

    The official function fails on a fraction if the right number is whole: the score is 0 here.
    """
    found = re.search(r"\d+\.\d+|\d+", prediction)
    right = json.loads(answer)
    if found is None:
        return 0.0
    return float(
        (float(found.group()) if isinstance(right, float) else _parse_integer(found.group()))
        == right
    )


def values_in_a_row(prediction: str, answer: str) -> float:
    """Share in [0, 1] of the answer's numbers (a JSON list) that the prediction gives in order before a wrong one.

    Signs do not count, as in the official function.
    """
    right = json.loads(answer)
    # A repetitive model may sample more digits than Python converts to an int: not a number.
    said = [_parse_integer(each) for each in re.findall(r"[0-9]+", prediction)]
    wrong = (at for at, value in enumerate(right) if at >= len(said) or said[at] != value)
    return next(wrong, len(right)) / len(right)


def faulty_function(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 if the right letter starts the prediction ("B."), or it or the name follows "is:", "answer:"; else 0."""
    name, letter = answers
    said = prediction.strip()
    if said[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        said = said.replace(mark, " ")
    behind = _find_text_after_prefix(
        re.sub(" +", " ", said), ("answer is:", "is:", "answer:", "correct option is:")
    )
    return float(behind is not None and behind.startswith((letter, name)))


def chosen_letter(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the option at the start, else after "answer is", else the first lone A to D, is right; else 0.0."""
    said = prediction.strip()
    if not said:
        return 0.0
    if said[0] in LETTERS:
        return float(said[0] in answers)
    if said in answers:
        return 1.0
    said = re.sub(" +", " ", _replace_with_spaces(said, _MARKS.replace(":", "")))
    behind = _find_text_after_prefix(said, ("answer is:", "answer:", "answer is", "option is"))
    if behind is not None:
        return float(behind.startswith(tuple(answers)))
    # "AB" is a part of "ABCD" and counts as a letter, as in the official function.
    return float(next((word for word in said.split() if word in LETTERS), "") in answers)


def _find_text_after_prefix(said: str, prefixes: Sequence[str]) -> str | None:
    """Return the text after the first listed prefix found, less one character; NUL if empty; None if none."""
    at = next((said.find(each) + len(each) for each in prefixes if each in said), None)
    return None if at is None else said[at + 1 :] or "\0"


def _replace_with_spaces(text: str, marks: str) -> str:
    """Replace each character of a text that is in `marks` by a space."""
    return text.translate(str.maketrans(marks, " " * len(marks)))


def _parse_integer(word: str) -> int | None:
    """Parse a word as an int; None if the word is not one."""
    try:
        return int(word)
    except ValueError:
        return None
