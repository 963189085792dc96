"""`jaxkv serve` as a process of its own, over a small model that speaks characters."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import lettered

ROOT = Path(__file__).parent.parent
KEY = "sesame"
QUICK = (
    "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)


def model_folder(parent):
    """A model's folder with a tokenizer of characters."""
    folder = parent / "model"
    shutil.copytree(lettered.FOLDER, folder, copy_function=shutil.copyfile)
    (folder / "tokenizer.json").write_text(lettered.characters().tokenizer_json())
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": lettered.TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@contextlib.contextmanager
def launched(folder, *options, program=("-m", "jaxkv")):
    """A server's process, which is starting."""
    limits = "--slots 1 --max-prompt-tokens 60 --max-new-tokens 60 --max-question-tokens 0"
    named = "--served-model-name tiny --policy knorm --budget 16 --port 0"
    command = [sys.executable, *program, "serve", "--model", str(folder)]
    command += [*named.split(), *limits.split(), *options]
    environment = {
        **os.environ,
        "JAXKV_CACHE": str(folder.parent),
        "XLA_FLAGS": QUICK,
        "JAXKV_API_KEY": KEY,
    }
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    with process.stderr:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def started(folder, *options):
    """A server's process, its address, and a list of its lines on stderr, complete once the process has ended."""
    lines, address, reader = [], None, None
    with launched(folder, *options) as process:
        try:
            while address is None:
                lines.append(process.stderr.readline())
                assert lines[-1], "".join(lines)
                address = re.search(r"at (http://127\.0\.0\.1:\d+)/v1, 1 slots", lines[-1])
            reader = threading.Thread(target=lines.extend, args=(process.stderr,))
            reader.start()
            yield process, address[1], lines
        finally:
            process.kill()
            if reader is not None:
                reader.join()
