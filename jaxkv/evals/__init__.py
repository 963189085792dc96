"""Evaluations: tasks that score compressed caches, and `evaluate` and `report`, which run and show them."""

from jaxkv.evals.html_report import report
from jaxkv.evals.needle import Needle
from jaxkv.evals.perplexity import TextLossTask
from jaxkv.evals.published import InfiniteBench, LongBench
from jaxkv.evals.qa import DocumentQuestionsTask
from jaxkv.evals.question_tasks import QuestionTask, answer_samples, encode_sample
from jaxkv.evals.results import (
    Evaluation,
    EvaluationSettings,
    PolicySummary,
    SampleRecord,
    ScoreDifference,
    compute_confidence_interval,
)
from jaxkv.evals.retrieval import COLOURS, TwoStage, VisibleAttentionTask, measure_visible_attention
from jaxkv.evals.ruler.ruler_task import Ruler
from jaxkv.evals.runs import at_budgets, evaluate
from jaxkv.evals.task import TASKS, EvaluationTask, How, SampleOutcome, TaskSample, task
from jaxkv.evals.turns import ConversationTask

__all__ = [
    "COLOURS",
    "TASKS",
    "PolicySummary",
    "ScoreDifference",
    "DocumentQuestionsTask",
    "Evaluation",
    "How",
    "InfiniteBench",
    "LongBench",
    "TextLossTask",
    "Needle",
    "SampleOutcome",
    "QuestionTask",
    "SampleRecord",
    "Ruler",
    "EvaluationSettings",
    "TaskSample",
    "EvaluationTask",
    "ConversationTask",
    "TwoStage",
    "VisibleAttentionTask",
    "answer_samples",
    "at_budgets",
    "evaluate",
    "encode_sample",
    "compute_confidence_interval",
    "report",
    "task",
    "measure_visible_attention",
]
