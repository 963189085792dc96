"""Writes what the official functions of LongBench and InfiniteBench say of fixed pairs.

Both repositories' functions are imported from checkouts of them (THUDM/LongBench 2e00731, OpenBMB/InfiniteBench
88b3daa), in an environment with ``rouge==1.0.1 fuzzywuzzy==0.18.0 jieba==0.42.1 rouge-score==0.1.2 RapidFuzz==3.14.6``
and without python-Levenshtein, as LongBench's requirements have it::

    python tests/golden/metrics/make_metrics.py LONGBENCH INFINITEBENCH

InfiniteBench takes rougeLsum from ``evaluate.load("rouge")``, which fetches a script from the hub; that script calls
rouge-score's ``RougeScorer(use_stemmer=False)``, and so does the stand-in below. Nothing of this project is imported.
"""

import json
import random
import sys
import types
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
LONG, INFINITE = Path(sys.argv[1]), Path(sys.argv[2])

SUMMARIES = [
    (
        "The report finds delays. Costs rose by a third.",
        "Costs rose by a third. The report finds that delays grew.",
    ),
    ("the the the the", "the cat sat on the mat"),
    ("A b c. D e f.", "d e f. a b c."),
    ("Hello there. ", "Hello. There "),
    ("", "something"),
    ("...", "something"),
    (" ", "something"),
    ("something", "."),
    ("First line\nsecond line\nthird one", "second line\nfirst line\nanother third"),
    ("one two three four five six", "six five four three two one"),
    ("a x b y c z", "a b c x y z"),
    ("Émile's café. 42 percent!", "emile's cafe; 42 percent"),
]
ANSWERS = [
    ("The Eiffel Tower", "eiffel tower"),
    ("It was in 1883, in Paris.", "1883"),
    ("an apple a day", "Apple day apple"),
    ("Unanswerable", "unanswerable"),
    ("no", "yes"),
    ("", "yes"),
    ("the", "the"),
    ("well-known state-of-the-art model", "well known state of the art model"),
    ("Ａ full-width answer", "full width answer"),
]
CODE = [
    ("    return self.value", "    return self.value"),
    ("\n\n# a comment\n// another\nreturn x + 1\nmore", "return x + 2"),
    ("```python\nint a = 1;\n```", "int a = 2;"),
    ("# only a comment", "x = 1"),
    ("", "x = 1"),
    ("", ""),
    ("abcd", "bcde"),
    ("for (int i = 0; i < n; i++) {", "for (int j = 0; j < count; ++j) {"),
    ('private static final String NAME = "name";', "private final static int VALUE = 12;"),
    ("return " + "a.b(c), " * 40, "return " + "a.c(b), " * 40),
]
CLASSES = ["Number of something", "number", "Human", "Human being", "being", "Other number", "Date"]
CLASS_PAIRS = [
    ("Date", "Date"),
    ("Human being", "Human being"),
    ("Human", "Human being"),
    ("Number of something", "number"),
    ("Date or Human being or Other number", "Other number"),
    ("number Human", "number"),
    ("nothing", "Date"),
    ("Other number, being", "Human being"),
]
NUMBERS = [
    ("There are 7 of 10", "7"),
    ("7", "7"),
    ("17", "7"),
    ("", "7"),
    ("7 7 8", "7"),
    ("seven", "7"),
]
PARAGRAPHS = [
    ("Paragraph 12", "Paragraph 12"),
    ("12 or 13", "Paragraph 12"),
    ("none", "Paragraph 3"),
    ("3.", "Paragraph 3"),
]
INFINITE_PAIRS = {
    "passkey": [
        (" 71432.", ["71432"]),
        ("71432 1", "71432"),
        ("the key 5", ["71432"]),
        ("", ["71432"]),
        ("0071", ["71"]),
    ],
    "number_string": [("1222333 is it", ["1222333"]), ("12 22", ["1222"]), ("x", ["1222"])],
    "kv_retrieval": [
        ('"a1-b2"', "a1-b2"),
        ("{k: a1-b2}", "a1-b2"),
        ("a1-b2c", "a1-b2"),
        ("a1 - b2", "a1-b2"),
    ],
    "code_run": [
        ("The value is: 17.", [17]),
        ("17 it is", [17]),
        ("-4", [-4]),
        ("", [1]),
        ("'12'", 12),
        ("1.5", [15]),
    ],
    "code_debug": [
        ("A. run", ["run", "A"]),
        ("B: run", ["run", "A"]),
        ("The correct option is: A", ["run", "A"]),
        ("the answer is: run", ["run", "A"]),
        ("The answer is:", ["run", "A"]),
        ("I think Option A", ["run", "A"]),
        ("**Answer:** A", ["run", "A"]),
        ("What is: answer: A", ["run", "A"]),
        ("error is:  A", ["run", "A"]),
    ],
    "math_find": [
        ("It is 42", [42]),
        ("4.5", [4.5]),
        ("4.50 then 3", [4.5]),
        ("none", [3]),
        ("-7", [7]),
        ("8", 8),
    ],
    "math_calc": [
        ("1, 4, 8", [1, 4, 8]),
        ("1, 5, 8", [1, 4, 8]),
        ("[1, 4", [1, 4, 8]),
        ("1 -4 8 9", [[1, 4, 8]]),
        ("", [1]),
    ],
    "longdialogue_qa_eng": [
        ("Mary.", ["MARY"]),
        ("It's JOHN: he", ["JOHN"]),
        ("Johnny", ["JOHN"]),
        ("JO ANN", ["JO ANN"]),
    ],
    "longbook_choice_eng": [
        ("A", ["The sea", "A"]),
        ("Because", ["The sea", "B"]),
        ("The sea", ["The sea", "C"]),
        ("the answer is: C", ["The sea", "C"]),
        ("so the answer is The sea", ["The sea", "C"]),
        ("surely the option is", ["The sea", "C"]),
        ("I say AB or C", ["The sea", "C"]),
        ("it may be C, or D", ["The sea", "C"]),
        ("{D}", ["The sea", "D"]),
        ("", ["The sea", "C"]),
        ("none", ["The sea", "C"]),
    ],
    "longbook_qa_eng": [
        ("In the old mill", ["The old mill", "a mill"]),
        ("x", ["y"]),
        ("Mill a", ["mill"]),
    ],
    "longbook_qa_chn": [
        ("他在北京。", ["北京", "在北京"]),
        ("上海", ["北京"]),
        ("他 说：「好」", ["他说好"]),
    ],
    "longbook_sum_eng": [],
}


def texts(rng, count):
    """Pairs of sentences of a few words, so that much is in common."""
    words = "the a of report finds cost Costs rise rising. delay in 1883 war. peace, treaty signed".split()
    text = lambda: " ".join(rng.choice(words) for _ in range(rng.randint(3, 40)))  # noqa: E731
    return [(text(), text()) for _ in range(count)]


def longbench():
    sys.path.insert(0, str(LONG / "LongBench"))
    warnings.simplefilter("ignore")
    import metrics
    from rapidfuzz import fuzz

    rng = random.Random(0)
    classes = {"all_classes": CLASSES}
    kinds = {
        "rouge_l": (metrics.rouge_score, SUMMARIES + texts(rng, 12)),
        "answer_f1": (metrics.qa_f1_score, ANSWERS + texts(rng, 4)),
        "line_of_code": (metrics.code_sim_score, CODE + texts(rng, 12)),
        "one_class": (lambda a, b: metrics.classification_score(a, b, **classes), CLASS_PAIRS),
        "share_of_numbers": (metrics.count_score, NUMBERS),
        "paragraph": (metrics.retrieval_score, PARAGRAPHS),
    }
    found = {
        name: [[*pair, float(of(*pair))] for pair in pairs] for name, (of, pairs) in kinds.items()
    }
    lines = [
        (said, right, score) for said, right, score in found["line_of_code"] if "\n" not in said
    ]
    # Why RapidFuzz is not used: how many of these it gives otherwise.
    other = sum(round(fuzz.ratio(said, right)) / 100 != score for said, right, score in lines)
    return found | {"classes": CLASSES, "rapidfuzz_differs": other}


def infinitebench():
    scorer = types.ModuleType("evaluate")

    class Rouge:
        def compute(self, predictions, references, use_aggregator):
            from rouge_score.rouge_scorer import RougeScorer

            of, (said,), (right,) = (
                RougeScorer(["rougeLsum"], use_stemmer=False),
                predictions,
                references,
            )
            score = (
                of.score_multi(right, said) if isinstance(right, list) else of.score(right, said)
            )
            return {"rougeLsum": [score["rougeLsum"].fmeasure]}

    scorer.load = lambda name: Rouge()
    args = types.ModuleType("args")
    args.parse_args = None
    sys.modules |= {"evaluate": scorer, "args": args}
    sys.path.insert(0, str(INFINITE / "src"))
    import compute_scores

    rng = random.Random(1)
    pairs = dict(INFINITE_PAIRS)
    pairs["longbook_sum_eng"] = SUMMARIES + [
        (said, [right, "treaty signed"]) for said, right in texts(rng, 6)
    ]
    pairs["longbook_sum_eng"] += [
        ("One.\nTwo three.", "two\nthree. one"),
        ("Running dogs", "run dog"),
    ]
    score = compute_scores.get_score_one
    return {
        name: [[said, right, score(said, right, name, "yarn-mistral")] for said, right in of]
        for name, of in pairs.items()
    }


if __name__ == "__main__":
    found = {"longbench": longbench(), "infinitebench": infinitebench()}
    lines = [
        f"{json.dumps(key)}: {json.dumps(each, ensure_ascii=False)}" for key, each in found.items()
    ]
    (HERE / "metrics.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
