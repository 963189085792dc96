"""The command `llm`: an answer whole and in pieces, and JSON of a schema."""

import json
import os
import subprocess
import sys
from pathlib import Path

URL, MODEL = sys.argv[1:3]
# A subset of YAML.
known = {"model_id": "here", "model_name": MODEL, "api_base": URL, "supports_schema": True}
Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(json.dumps([known]))


def run(*options):
    """What the command prints."""
    command = [sys.executable, "-m", "llm", "-m", "here", "Name a colour of the sky.", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


short = ("-o", "temperature", "0", "-o", "max_tokens", "24")
whole = run(*short, "--no-stream")
print(repr(whole))
assert whole == run(*short)
schema = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "warm": {"type": "boolean"}},
    "required": ["sky", "warm"],
    "additionalProperties": False,
}
limits = ("-o", "temperature", "0", "-o", "max_tokens", "300")
found = json.loads(run(*limits, "--schema", json.dumps(schema)))
print(found)
assert found["sky"] in ("blue", "grey") and isinstance(found["warm"], bool)
