"""Examples of commands, shown by `jaxkv --help` and `jaxkv generate --help`."""

EXAMPLES = """\
examples:
  ask a question about a document, keeping 256 rows per kv head of its cache:
    jaxkv generate --model smollm2-135m-instruct --policy adakv --budget 256 \\
        --prompt-file report.txt --question "What did it cost?"

  keep a fifth of the cache, with PyramidKV; one JSON object on stdout:
    jaxkv generate --policy pyramidkv --budget 0.2 --prompt-file report.txt --question "Who?" --json

  Ada-KV over PyramidKV, with the first 4 tokens and tokens 100 to 199 always kept:
    jaxkv generate --policy adakv --base pyramidkv --budget 512 --sinks 4 --protect 100:200 --prompt-file report.txt

  no compression, plain text instead of a chat, sampled:
    jaxkv generate --policy full --raw --prompt "Once upon a time" --temperature 0.8 --top-p 0.9 --seed 1

  whether a model, a policy and prompts fit on GPUs that are not there:
    jaxkv plan --model llama-3.1-70b --gpus h100x8 --context 131072 --batch 4 --policy adakv --budget 2048

  which models and policies there are:
    jaxkv models
    jaxkv policies
"""
