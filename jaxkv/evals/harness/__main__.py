"""Runs lm-evaluation-harness's command line with the model "jaxkv" registered.

python -m jaxkv.evals.harness run --model jaxkv --tasks gsm8k,coqa,truthfulqa_gen \
    --model_args model=smollm2-135m-instruct,policy=snapkv,budget=256 --batch_size 8
"""

import lm_eval.models  # noqa: F401  # registers the harness's models; it must be imported before ours
from lm_eval.__main__ import cli_evaluate

import jaxkv.evals.harness  # noqa: F401  # registers jaxkv's model

if __name__ == "__main__":
    cli_evaluate()
