"""What tests of agents share: chat templates of each format of calls, a tokenizer for them, and scripted answers."""

import collections
import functools

import numpy as np
import tiny
from tokenizers import Tokenizer, decoders, models

import jaxkv
from jaxkv.engine.generation_results import AnswerCollector
from jaxkv.loading import LanguageModel
from jaxkv.text.tokenizer import ChatTokenizer

SPECIALS = (
    "<unk> <s> </s> <|im_start|> <|im_end|> <|eot|> <|python_tag|> [TOOL_CALLS] [ARGS] [INST] [/INST] "
    "[RESULT] [/RESULT] <|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>"
).split()
# In the manner of Qwen3, Llama 3.1, Mistral and gpt-oss.
TEMPLATES = {
    "hermes": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Call: <tool_call>JSON</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' }}
        {%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}{%- endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
    "llama3": """\
{{- bos_token }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' + tools | tojson(indent=4) + '<|eot|>' }}{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- 'assistant:{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson + '}<|eot|>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}{{- 'ipython:' + m.content | tojson + '<|eot|>' }}
    {%- else %}{{- m.role + ':' + m.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}
""",
    "mistral": """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and loop.last %}{{- tools | tojson }}{%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}{{- '[RESULT]' + m.tool_call_id + ':' + m.content + '[/RESULT]' }}
    {%- else %}{{- m.content + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "harmony": """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.content and m.thinking %}{{- raise_exception('content and thinking') }}{%- endif %}
        {%- if m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {%- for call in m.tool_calls %}
            {{- '<|start|>assistant to=functions.' + call.function.name }}
            {{- '<|channel|>commentary json<|message|>' + call.function.arguments | tojson + '<|call|>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
    {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
""",
}
ENDS = {"hermes": "<|im_end|>", "llama3": "<|eot|>", "mistral": "</s>", "harmony": "<|return|>"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {key: {}}}},
    }
    for name, key in (("find", "town"), ("add", "terms"))
]


def tokenizer(kind: str) -> ChatTokenizer:
    """A tokenizer of characters with the special tokens of all formats, and one template."""
    letters = ["\n", *map(chr, range(32, 127))]
    vocab = {token: index for index, token in enumerate([*SPECIALS, *letters])}
    inner = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    # llguidance takes byte-level tokenizers and those that fall back on bytes.
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(SPECIALS)
    specials = {"bos_token": "<s>", "eos_token": ENDS[kind]}
    template, ends = TEMPLATES.get(kind, kind), ("<|call|>",)
    return ChatTokenizer(
        inner, specials=specials, eos_ids=map(inner.token_to_id, ends), template=template
    )


@functools.cache
def model(kind: str) -> LanguageModel:
    """A small model of random weights that reads and writes characters."""
    config = jaxkv.ModelConfig(
        vocab=128,
        layers=2,
        embed=16,
        hidden=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        max_positions=2048,
    )
    return LanguageModel(tiny.tiny(config).decoder, text=tokenizer(kind), name=kind)


class ScriptedAnswers(AnswerCollector):
    """Answers of given texts, in order, whatever the model samples; requests must ignore its end tokens."""

    scripts = collections.deque()

    def __init__(self, text, batch, stops, kept, top):
        super().__init__(text, batch, stops, kept, top)
        self._script = text.encode(self.scripts.popleft(), bos=False)
        self._ends = text.eos_ids

    def append_token_ids(self, sampled, logprobs=None):
        count = int((sampled >= 0).sum())
        fresh, self._script = self._script[:count], self._script[count:]
        return super().append_token_ids(np.asarray([fresh], np.int32))

    def build_completions(self, eos, prompts=()):
        return super().build_completions(self._ends, prompts)

    @property
    def stopped_sequences(self):
        return np.asarray([not self._script])
