"""Tasks that compressed caches are judged by."""

from jaxkv.evals.asking import QuestionTask, answers, ids_of
from jaxkv.evals.needle import Needle
from jaxkv.evals.retrieval import COLOURS, Question, TwoStage, two_stage
from jaxkv.evals.ruler import Ruler
from jaxkv.evals.task import TASKS, How, Outcome, Sample, Task, task

__all__ = [
    "COLOURS",
    "TASKS",
    "How",
    "Needle",
    "Outcome",
    "Question",
    "QuestionTask",
    "Ruler",
    "Sample",
    "Task",
    "TwoStage",
    "answers",
    "ids_of",
    "task",
    "two_stage",
]
