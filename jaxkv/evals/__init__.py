"""Evaluations: tasks that score compressed caches, and `evaluate` and `report`, which run and show them."""

from jaxkv.evals.html_report import report
from jaxkv.evals.needle import Needle
from jaxkv.evals.perplexity import Loss
from jaxkv.evals.published import InfiniteBench, LongBench
from jaxkv.evals.qa import DocumentQuestions
from jaxkv.evals.question_tasks import QuestionTask, asked, ids_of
from jaxkv.evals.results import Cell, Difference, Evaluation, Record, Run, interval
from jaxkv.evals.retrieval import COLOURS, TwoStage, Visible, visible_attention
from jaxkv.evals.ruler.ruler_task import Ruler
from jaxkv.evals.runs import at_budgets, evaluate
from jaxkv.evals.task import TASKS, How, Outcome, Sample, Task, task
from jaxkv.evals.turns import Turns

__all__ = [
    "COLOURS",
    "TASKS",
    "Cell",
    "Difference",
    "DocumentQuestions",
    "Evaluation",
    "How",
    "InfiniteBench",
    "LongBench",
    "Loss",
    "Needle",
    "Outcome",
    "QuestionTask",
    "Record",
    "Ruler",
    "Run",
    "Sample",
    "Task",
    "Turns",
    "TwoStage",
    "Visible",
    "asked",
    "at_budgets",
    "evaluate",
    "ids_of",
    "interval",
    "report",
    "task",
    "visible_attention",
]
