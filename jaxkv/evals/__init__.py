"""Tasks that compressed caches are judged by."""

from jaxkv.evals.retrieval import COLOURS, Question, two_stage

__all__ = ["COLOURS", "Question", "two_stage"]
