"""Tasks that compressed caches are judged by."""

from jaxkv.evals.asking import QuestionTask, answers, ids_of
from jaxkv.evals.infinitebench import InfiniteBench
from jaxkv.evals.longbench import LongBench
from jaxkv.evals.perplexity import Loss, Perplexity
from jaxkv.evals.retrieval import COLOURS, Question, TwoStage, two_stage
from jaxkv.evals.task import TASKS, How, Outcome, Sample, Task, task
from jaxkv.evals.turns import Turns

__all__ = [
    "COLOURS",
    "TASKS",
    "How",
    "InfiniteBench",
    "LongBench",
    "Loss",
    "Outcome",
    "Perplexity",
    "Question",
    "QuestionTask",
    "Sample",
    "Task",
    "Turns",
    "TwoStage",
    "answers",
    "ids_of",
    "task",
    "two_stage",
]
