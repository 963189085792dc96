"""lm-evaluation-harness' `local-completions`: log-likelihoods of a local task's choices."""

import json
import math
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

URL, MODEL = sys.argv[1:3]
rows = [
    {"ask": "The sky is", "options": ["blue", "cold soup"], "right": 0},
    {"ask": "Snow is", "options": ["green", "white"], "right": 1},
]
Path("rows.json").write_text("\n".join(map(json.dumps, rows)))
task = {
    "task": "skies",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path("rows.json").absolute())}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{ask}}",
    "doc_to_choice": "{{options}}",
    "doc_to_target": "right",
}
options = {"model": MODEL, "base_url": f"{URL}/completions", "tokenizer": "tokenizer"}
found = lm_eval.simple_evaluate(
    model="local-completions", model_args=options, tasks=[task], task_manager=TaskManager()
)
for sample in found["samples"]["skies"]:
    for (loss, greedy), *_ in sample["resps"]:
        print(loss, greedy)
        assert math.isfinite(float(loss)) and float(loss) < 0
