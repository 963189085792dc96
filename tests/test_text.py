"""Tokenizers and chat templates, against the ids of the original tokenizer."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxkv.checkpoints import GgufTokenizer, fetch_checkpoint, open_checkpoint
from jaxkv.checkpoints.source import Checkpoint
from jaxkv.text.tokenizer import ChatTokenizer, StreamDecoder

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokens.json").read_text("utf-8"))
CHAT = next(entry for entry in GOLDEN if entry.get("note") == "chat template of one user message")
U1, A1, U2 = "What is copper?", "A metal.", "And tin?"


@pytest.fixture(scope="module")
def text():
    return ChatTokenizer.from_checkpoint(open_checkpoint(fetch_checkpoint("smollm2-135m-instruct")))


def conversation(*contents):
    return [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]


# --- SmolLM2, from its GGUF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", GOLDEN, ids=range(len(GOLDEN)))
def test_ids_are_those_of_the_original(text, entry):
    assert text.encode(entry["text"], bos=False) == entry["ids"]
    # This tokenizer has a bos token but is not configured to add it.
    assert text.encode(entry["text"], bos=True) == entry["ids"]
    assert text.decode(entry["ids"], skip_special=False) == entry["text"]


def test_special_ids(text):
    assert (text.bos_id, text.eos_ids, text.has_template) == (1, (2,), True)
    assert text.decode([1, 19556, 2]) == "Hello"


def test_chat_template(text):
    assert text.render_chat(conversation(U1), generation_prompt=True) == CHAT["text"]


def test_turns_join_to_the_full_rendering(text):
    joined = text.turn_texts.opening + U1 + text.turn_texts.closing
    assert joined == text.render_chat(conversation(U1), generation_prompt=True)
    joined += A1 + text.turn_texts.between + U2 + text.turn_texts.closing
    assert joined == text.render_chat(conversation(U1, A1, U2), generation_prompt=True)
    assert text.turn_texts.between == "<|im_end|>\n<|im_start|>user\n"


@pytest.mark.parametrize("string", ["naïve café 漢字 🙂 done", " 🙂🙂", "plain", "漢字漢字"])
@pytest.mark.parametrize("step", [1, 5])
def test_stream_gives_whole_characters(text, string, step):
    ids = text.encode(string, bos=False)
    stream = StreamDecoder(text)
    parts = [stream.push_ids(ids[start : start + step]) for start in range(0, len(ids), step)]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) + stream.flush_text() == string


def test_stream_ends_inside_a_character(text):
    ids = text.encode("ok 漢", bos=False)
    stream = StreamDecoder(text)
    shown = "".join(stream.push_ids([each]) for each in ids[:-1])
    assert "\ufffd" not in shown and shown.startswith("ok")
    assert shown + stream.flush_text() == "ok \ufffd" and stream.flush_text() == ""


def test_stream_does_not_hold_bad_bytes_for_ever(text):
    bad = text.encode("🙂", bos=False)[:1] * 40
    stream = StreamDecoder(text)
    assert any(stream.push_ids([each]) for each in bad)


def test_stream_skips_special_tokens(text):
    stream = StreamDecoder(text)
    assert [stream.push_ids([each]) for each in (19556, 2, 1, 905)] == ["Hello", "", "", " world"]


# --- other templates ------------------------------------------------------------------------------------------------

LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
)


CHATML = "{% for m in messages %}<end>{{ m.role + ':' + m.content + '<end>' }}{% endfor %}"


def byte_level(*specials):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def with_template(template, **options):
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTokenizer(
        byte_level("<s>", "</s>", "<end>"),
        specials=specials,
        adds_bos=True,
        template=template,
        **options,
    )


def test_bos_is_never_doubled():
    text = with_template(LLAMA2)
    rendered = text.render_chat(conversation("Hi"), generation_prompt=True)
    assert rendered.startswith("<s>")
    assert text.encode(rendered, bos=True).count(text.bos_id) == 1
    assert text.encode("Hi", bos=True)[0] == text.bos_id
    assert text.encode("Hi", bos=False)[0] != text.bos_id
    assert text.turn_texts.between == "</s>[INST] "


def test_template_that_refuses():
    with pytest.raises(ValueError, match=r"messages=\['system'\].*no system role"):
        with_template(LLAMA2).render_chat(
            [{"role": "system", "content": "x"}], generation_prompt=False
        )


def test_template_that_loses_or_repeats_messages():
    for template in (
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
    ):
        text = with_template(template, origin="odd-model")
        with pytest.raises(ValueError, match="chat_template='odd-model'.*cannot be split"):
            _ = text.turn_texts


def test_end_of_turn_comes_from_the_template():
    text = with_template(
        "{% for m in messages %}{{ m.role + ':' + m.content + '<end>' }}{% endfor %}"
    )
    assert [text.decode([each], skip_special=False) for each in text.eos_ids] == ["</s>", "<end>"]


def test_template_is_sandboxed_and_has_the_usual_helpers():
    with pytest.raises(ValueError, match="unsafe"):
        with_template("{{ ''.__class__.__mro__ }}").render_chat([], generation_prompt=False)
    helpers = "{% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}{{ strftime_now('%Y') | length }}"
    helpers += "{% for i in [1, 2] %}{% break %}{% endfor %}"
    assert with_template(helpers).render_chat([], generation_prompt=False) == '{"a": "<é>"}4'


# --- folders --------------------------------------------------------------------------------------------------------


def open_folder(folder, **config):
    return Checkpoint(path=folder, config=config, stored={}, tokenizer_spec=folder)


def test_folder(tmp_path):
    tokenizer = byte_level("<s>", "</s>", "<end>")
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(LLAMA2)
    text = ChatTokenizer.from_checkpoint(
        open_folder(tmp_path, eos_token_id=[tokenizer.token_to_id("<end>")])
    )
    assert text.eos_ids == (tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<end>"))
    # The post-processor says that a bos token is added; the training run's truncation is not kept.
    assert text.decode(text.encode("longer text", bos=True), skip_special=False) == "<s>longer text"
    assert text.render_chat(conversation("Hi"), generation_prompt=True) == "<s>[INST] Hi [/INST]"
    settings |= {"add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert len(ChatTokenizer.from_checkpoint(open_folder(tmp_path)).encode("a", bos=True)) == 1


def test_folder_without_tokenizer(tmp_path):
    checkpoint = Checkpoint(path=tmp_path, config={}, stored={}, tokenizer_spec=None)
    assert ChatTokenizer.from_checkpoint(checkpoint) is None


CORRUPT = {
    "empty": b"",
    "nested": b'{"version": "1.0", "model": ' + b"[" * 100_000,
    "negative id": b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":-1},"merges":[]}}',
}


@pytest.mark.parametrize("content", CORRUPT)
def test_corrupt_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(CORRUPT[content])
    with pytest.raises(ValueError, match=r"tokenizer='.*tokenizer\.json': it cannot be read"):
        ChatTokenizer.from_checkpoint(open_folder(tmp_path))


@pytest.mark.parametrize("hostile", ["x" * 60, "\ud800"])
def test_text_that_the_tokenizer_fails_on(hostile):
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    with pytest.raises(ValueError, match="prompt='...': the tokenizer cannot"):
        ChatTokenizer(tokenizer, origin="odd-model").encode(hostile, bos=False)


def test_tokenizer_too_large_to_be_one(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(ValueError, match=r"tokenizer\.json: 8,589,934,592 bytes are more than"):
        ChatTokenizer.from_checkpoint(open_folder(tmp_path))


def test_sentencepiece_is_an_extra(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tokenizer='.*pip install 'jaxkv\[sentencepiece\]'"):
        ChatTokenizer.from_checkpoint(open_folder(tmp_path))


def test_a_tokenizers_own_code_is_neither_run_nor_asked_about(tmp_path, monkeypatch):
    (tmp_path / "vocab.json").write_text("{}")
    own = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["odd.Odd", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    monkeypatch.setattr("builtins.input", None)
    with pytest.raises(ValueError, match="tokenizer="):
        ChatTokenizer.from_checkpoint(open_folder(tmp_path))


def folder_with(tmp_path, **settings):
    byte_level("<s>", "</s>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8-sig")
    return ChatTokenizer.from_checkpoint(open_folder(tmp_path))


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"chat_template": [{"name": "default"}]},
            r"chat_template=\{'name': 'default'\}: .*tokenizer_config\.json",
        ),
    ],
)
def test_settings_of_another_kind(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        folder_with(tmp_path, **settings)


def test_a_template_of_several(tmp_path):
    several = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]
    text = folder_with(tmp_path, chat_template=several)
    assert text.render_chat(conversation("Hi"), generation_prompt=False) == "Hi"


def test_byte_order_marks_are_no_text(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(CHATML, "utf-8-sig")
    text = folder_with(tmp_path, bos_token="<s>")
    assert text.render_chat(conversation("Hi"), generation_prompt=False) == "<end>user:Hi<end>"
    assert text.bos_id is not None


# --- other GGUF vocabularies ----------------------------------------------------------------------------------------


def sentencepiece():
    pieces = {"<unk>": 0, "<s>": 0, "</s>": 0} | {f"<0x{byte:02X}>": 0 for byte in range(256)}
    pieces |= {"▁the": -1, "▁t": -2, "he": -3, "▁c": -4, "at": -5, "▁cat": -6}
    pieces |= {letter: -10 - index for index, letter in enumerate("▁theca")}
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    scores = tuple(map(float, pieces.values()))
    return GgufTokenizer(
        model="llama", tokens=tuple(pieces), scores=scores, types=tuple(types), bos=1, eos=2, unk=0
    )


def test_sentencepiece():
    spec = sentencepiece()
    checkpoint = Checkpoint(path=Path("x"), config={}, stored={}, tokenizer_spec=spec)
    text = ChatTokenizer.from_checkpoint(checkpoint)
    ids = text.encode("the cat 🙂", bos=True)
    emoji = [f"<0x{byte:02X}>" for byte in "🙂".encode()]
    assert [spec.tokens[each] for each in ids] == ["<s>", "▁the", "▁cat", "▁", *emoji]
    assert text.decode(ids) == "the cat 🙂"
    stream = StreamDecoder(text)
    assert [part for part in (stream.push_ids([each]) for each in ids) if part] == [
        "the",
        " cat",
        " ",
        "🙂",
    ]


def words(pre, text="I'LL pay 12345\n\n now"):
    """The pieces that a pre-tokenizer cuts text into, before any merge."""
    alphabet = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = GgufTokenizer(
        model="gpt2", pre=pre, tokens=alphabet, types=(1,) * len(alphabet)
    ).build_tokenizer()
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_pre_tokenizers():
    assert words("gpt-2") == ["I", "'", "LL", "Ġpay", "Ġ12345", "ĊĊ", "Ġnow"]
    assert words("smollm") == ["I", "'", "LL", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "Ġnow"]
    assert words("llama-bpe") == ["I", "'LL", "Ġpay", "Ġ", "123", "45", "ĊĊ", "Ġnow"]
    assert words("gpt-4o") == ["I'LL", "Ġpay", "Ġ", "123", "45", "ĊĊ", "Ġnow"]
    assert words("gpt-4o", "myHTTPServer isn't/\n") == ["my", "HTTPServer", "Ġisn't", "/Ċ"]
    assert words("qwen2") == ["I", "'LL", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "Ġnow"]


def test_vocabularies_of_llama_3_add_bos():
    assert GgufTokenizer(model="gpt2", pre="llama-bpe", tokens=("a",)).adds_bos
    assert not GgufTokenizer(model="gpt2", pre="smollm", tokens=("a",)).adds_bos
