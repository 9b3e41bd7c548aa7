"""Chat templates against transformers; streamed text equals decoded text.

The tokenizers are of the two kinds that checkpoints use: byte-level (Llama 3, Qwen) and SentencePiece with byte
fallback (Llama 2, Mistral)."""

import datetime
import json
import random
import re

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Core

from tokenizer import Stream, Tokenizer, special_ids

WORDS = "the capital of France is Paris and the river runs through it . Größe naïve 中文 Ελλάδα 🙂 don't 1234 <b>&amp;"
TEXTS = ["", "The capital of France is Paris.", "two  spaces\n\n\ttab ", "Größe, naïve, 中文字, Ελλάδα",
         "🙂🙃👩\u200d👧 in 🙂 it"]
SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>", "[INST]", "[/INST]"]


def byte_level():
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([WORDS] * 3, trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL,
                                                              initial_alphabet=alphabet, show_progress=False))
    return core


def sentence_piece():
    pieces = ["<unk>"] + SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁"]
    pieces += sorted(set("abcdefghijklmnopqrstuvwxyzTFPG.,ößï\n文 ") - {" "}) + ["th", "▁th", "▁the", "is", "▁is", "▁▁"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("i", "s"), ("▁", "is"), ("▁", "▁")]
    core = Core(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, unk_token="<unk>",
                           byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    core.add_special_tokens(["<unk>"] + SPECIAL)
    return core


def metaspace():
    core = sentence_piece()
    core.normalizer = normalizers.Sequence([])
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)])
    return core


KINDS = {"byte-level": byte_level, "sentence-piece": sentence_piece, "metaspace": metaspace}


@pytest.fixture(params=KINDS)
def core(request):
    return KINDS[request.param]()


def save(folder, core, bos=True, generation=None, config=None, jinja=None, **tokenizer_config):
    """Writes a folder with only a tokenizer and loads it."""
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", core.token_to_id("<s>"))])
    core.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>"} | tokenizer_config
    files = {"tokenizer_config": tokenizer_config, "generation_config": generation, "config": config}
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return Tokenizer.load(folder)


# Templates with the constructs of each family.
TEMPLATES = {
    "llama-2": """{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}\
{% set system = messages[0]['content'] %}{% else %}{% set turns = messages %}{% set system = false %}{% endif %}\
{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate') }}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}\
{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama-3": """{{- bos_token }}
{%- if strftime_now is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if tools is not none %}{{ "tools: " + tools | tojson(indent=4) }}{%- endif %}
{{- "Today: " + date_string + "\\n" }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n\\n' }}{%- endif %}
""",
    "qwen3": """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is not string %}{%- continue %}{%- endif %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|start|>' + message.role + '\\n' + content + '<|end|>' + '\\n' }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- if tools %}{{- '# Tools' }}{%- endif %}
""",
    "blocks on lines of their own": """{{ bos_token }}
{% for message in messages %}
  {% if message.role == 'user' %}
{{ message.content }}
  {% endif %}
{% endfor %}
{{ messages | tojson }}{{ documents is none }}{{ unknown }}
""",
    "generation": """{% for message in messages %}
    {% if message.role == 'assistant' %}
        {% generation %}
{{ message.content }}
        {% endgeneration %}
    {% else %}
        {%- generation -%}  {{ loop.index }} {{ message.content }}  {%- endgeneration -%}
    {% endif %}
{% endfor %}{% generation %}{% set inner = 1 %}{{ inner }}{% endgeneration %}{{ inner is defined }}
""",
}
CONVERSATIONS = [
    [{"role": "user", "content": " What is <b>the</b> capital? 中文 "}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Is it Paris & not Rome?"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "the one"},
     {"role": "assistant", "content": "<think>x</think>\n\nthe two "}, {"role": "user", "content": "the three"}],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["byte-level", "sentence-piece"])
def test_chat_templates_give_the_ids_of_transformers(name, kind, tmp_path):
    from transformers import PreTrainedTokenizerFast
    bos = {"bos_token": None} if name.startswith("qwen") else {}
    tokenizer = save(tmp_path, KINDS[kind](), chat_template=TEMPLATES[name], **bos)
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="</s>",
                                     bos_token=bos.get("bos_token", "<s>"), chat_template=TEMPLATES[name])
    for messages in CONVERSATIONS:
        for generation_prompt in (True, False):
            ids = oracle.apply_chat_template(messages, add_generation_prompt=generation_prompt, return_dict=False)
            assert tokenizer.encode_chat(messages, generation_prompt) == ids
    assert tokenizer.encode(TEXTS[0]) == oracle(TEXTS[0])["input_ids"]


def test_plain_text_has_the_bos_of_the_tokenizer_once_and_answers_have_none(core, tmp_path):
    tokenizer = save(tmp_path, core, bos=False)
    assert tokenizer.bos_id not in tokenizer.encode("the river")
    tokenizer = save(tmp_path, core)
    ids = tokenizer.encode("the river")
    assert ids[0] == tokenizer.bos_id == core.token_to_id("<s>") and ids.count(tokenizer.bos_id) == 1
    assert tokenizer.encode("<s>the river").count(tokenizer.bos_id) == 1
    assert tokenizer.encode("") == [tokenizer.bos_id]
    assert tokenizer.encode("the river", bos=False) == ids[1:]


def test_truncation_and_padding_of_a_training_run_are_ignored(tmp_path):
    core = byte_level()
    core.enable_truncation(4)
    core.enable_padding(length=64)
    tokenizer = save(tmp_path, core, bos=False)
    assert tokenizer.decode(tokenizer.encode(WORDS)) == WORDS and len(tokenizer.encode("it")) < 64


def test_streamed_pieces_of_random_ids_join_to_the_decoded_text(core, tmp_path):
    tokenizer = save(tmp_path, core)
    pools = [range(len(tokenizer) + 20), range(len(tokenizer)), [i for t, i in core.get_vocab().items() if len(t) < 3],
             [i for t, i in core.get_vocab().items() if t.startswith("<0x") or t.startswith("▁")] or range(99)]
    for seed in range(12):
        draw = random.Random(seed)
        ids = [draw.choice(draw.choice(pools)) for _ in range(draw.choice([3, 40, 150]))]
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.end() == tokenizer.decode(ids)


def test_streamed_pieces_are_whole_characters_and_join_to_the_text(core, tmp_path):
    tokenizer = save(tmp_path, core)
    for text in TEXTS + [WORDS, "中文 the 🙂 " * 30]:
        ids, stream = tokenizer.encode(text), tokenizer.stream()
        pieces = [stream.push(i) for i in ids]
        assert "\ufffd" not in "".join(pieces) and "".join(pieces) + stream.end() == text
        assert len(stream.window) <= 2 * Stream.WINDOW + 4          # the cost of a push is bounded
        assert text != WORDS or sum(map(bool, pieces)) > len(ids) / 4       # it streams before the end


def test_an_unfinished_character_appears_at_the_end_only(tmp_path):
    tokenizer = save(tmp_path, byte_level())
    face = tokenizer.core.encode("🙃", add_special_tokens=False).ids
    assert len(face) > 1            # four bytes in several tokens
    stream = tokenizer.stream()
    assert [stream.push(i) for i in face] == [""] * (len(face) - 1) + ["🙃"]
    assert stream.push(face[0]) == "" and stream.end() == "\ufffd"


def test_special_tokens_and_unknown_ids_decode_to_nothing(core, tmp_path):
    tokenizer = save(tmp_path, core)
    ids = tokenizer.encode("the river")
    beyond = [len(tokenizer), len(tokenizer) + 1000, 2 ** 31]
    noisy = [tokenizer.eos_ids[0], *ids[:3], *beyond, tokenizer.bos_id, *ids[3:], *beyond]
    assert tokenizer.decode(noisy) == "the river" and tokenizer.decode(beyond) == "" == tokenizer.decode([])


@pytest.mark.parametrize("generation, token, config, eos", [
    ({"eos_token_id": [7, 9]}, "</s>", {"eos_token_id": 5}, (7, 9)),
    ({"eos_token_id": 7}, "</s>", None, (7,)),
    ({}, {"content": "</s>", "lstrip": False}, {"eos_token_id": 5}, (1, 5)),
    (None, "</s>", {"eos_token_id": [7, 1, 9]}, (1, 7, 9)),
    (None, None, {"eos_token_id": 0}, (0,)),
    (None, "<no-such-token>", None, ()),
])
def test_eos_ids_of_the_generation_config_take_precedence_over_the_tokenizers_and_the_configs(
        generation, token, config, eos, tmp_path):
    tokenizer = save(tmp_path, byte_level(), generation=generation, config=config, eos_token=token)
    assert tokenizer.eos_ids == eos and special_ids(tmp_path) == (tokenizer.bos_id, eos)


def test_special_ids_without_a_tokenizer_are_those_of_the_configuration(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": [3, 4]}')
    assert special_ids(tmp_path) == (None, (3, 4)) and special_ids(None) == (None, ())


@pytest.mark.parametrize("ids", ["2", [1, None], -1, True])
def test_malformed_eos_ids_are_refused(ids, tmp_path):
    with pytest.raises(ValueError, match="eos_token_id is .*; it must be an id or a list of ids"):
        save(tmp_path, byte_level(), generation={"eos_token_id": ids})


def test_the_jinja_file_takes_precedence_over_the_configuration_and_default_over_other_names(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "river"}]
    tokenizer = save(tmp_path, byte_level(), chat_template=named)
    assert tokenizer.has_chat_template and tokenizer.decode(tokenizer.encode_chat(CONVERSATIONS[0])) == "river"
    tokenizer = save(tmp_path, byte_level(), chat_template=named, jinja="Paris")
    assert tokenizer.decode(tokenizer.encode_chat(CONVERSATIONS[0])) == "Paris"


@pytest.mark.parametrize("template", [["x"], [{"name": "rag", "template": "x"}], 3])
def test_a_chat_template_of_another_kind_is_refused(template, tmp_path):
    with pytest.raises(ValueError, match="chat_template must be a text or a list of named texts"):
        save(tmp_path, byte_level(), chat_template=template)


def test_a_base_model_has_no_chat(tmp_path):
    tokenizer = save(tmp_path, byte_level())
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="has no chat template.*--raw"):
        tokenizer.encode_chat(CONVERSATIONS[0])


@pytest.mark.parametrize("template, words", [
    (TEMPLATES["llama-2"], "roles must alternate"),
    ("{{ raise_exception('no\nlines') }}", "no lines"),
    ("{% if %}", "Expected an expression"),
    ("{{ messages[5]['content'] }}", "no element 5"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{% generation %}", "endgeneration"),
])
def test_a_template_that_fails_or_leaves_the_sandbox_is_one_line(template, words, tmp_path):
    tokenizer = save(tmp_path, byte_level(), chat_template=template)
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match="the chat template rejects these messages: .*" + re.escape(words)) as error:
        tokenizer.encode_chat(messages)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_file_is_named(name, content, tmp_path):
    save(tmp_path, byte_level())
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(name)) as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_template_arguments_reach_the_template_and_unknown_ones_are_refused(tmp_path):
    from transformers import PreTrainedTokenizerFast
    tokenizer = save(tmp_path, byte_level(), chat_template=TEMPLATES["qwen3"])
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=TEMPLATES["qwen3"])
    for arguments in ({"enable_thinking": False}, {"enable_thinking": True}, {"tools": [{"name": "f"}]}):
        ids = oracle.apply_chat_template(CONVERSATIONS[2], add_generation_prompt=True, return_dict=False, **arguments)
        assert tokenizer.encode_chat(CONVERSATIONS[2], template_args=arguments) == ids
    assert tokenizer.template_reads("enable_thinking") and not tokenizer.template_reads("thinking")
    for key in ("thinking", "messages", "add_generation_prompt"):
        with pytest.raises(ValueError, match=f"the chat template has no argument '{key}'"):
            tokenizer.render(CONVERSATIONS[0], template_args={key: 1})


def test_templates_print_the_date_of_the_tokenizer_or_today(tmp_path):
    tokenizer = save(tmp_path, byte_level(), chat_template=TEMPLATES["llama-3"])
    tokenizer.today = datetime.date(2024, 7, 26)
    assert "Today: 26 Jul 2024" in tokenizer.render(CONVERSATIONS[0])
    tokenizer.today = None
    assert f"Today: {datetime.date.today():%d %b %Y}" in tokenizer.render(CONVERSATIONS[0])


def test_special_tokens_that_are_normalized_decode_to_nothing(tmp_path):
    """First-generation Llama tokenizers have them. tokenizers 0.23 itself does not skip them."""
    core = sentence_piece()
    core.add_special_tokens([AddedToken(token, normalized=True, special=True) for token in ("<s>", "</s>")])
    tokenizer = save(tmp_path, core)
    ids = tokenizer.encode("the river")
    stream = tokenizer.stream()
    assert ids[0] == tokenizer.bos_id and tokenizer.decode([*ids, *tokenizer.eos_ids]) == "the river"
    assert "".join(map(stream.push, [*ids, *tokenizer.eos_ids])) + stream.end() == "the river"


def test_a_special_token_missing_from_tokenizer_json_is_named_if_the_template_writes_it(tmp_path):
    tokenizer = save(tmp_path, byte_level(), bos_token="<bos>", chat_template="{{ bos_token }}hello")
    with pytest.raises(ValueError, match="writes bos_token '<bos>', which is not in tokenizer.json"):
        tokenizer.encode_chat(CONVERSATIONS[0])
    tokenizer = save(tmp_path, byte_level(), pad_token="<pad>", chat_template="{{ messages[0].content }}")
    assert tokenizer.render([{"role": "user", "content": "a <pad>"}]) == "a <pad>"


def test_older_checkpoints_have_special_tokens_in_a_separate_file(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "<|end|>"}')
    tokenizer = save(tmp_path, byte_level(), bos_token=None, eos_token="</s>")
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert save(tmp_path, byte_level(), added_tokens_decoder={}).special["eos_token"] == "</s>"


def test_texts_that_cannot_be_encoded_are_refused(tmp_path):
    tokenizer = save(tmp_path, byte_level(), chat_template="{{ messages[0]['content'] }}")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(ValueError, match="not UTF-8"):
            encode("a\ud800b")
    with pytest.raises(ValueError, match="must be a str"):
        tokenizer.encode(b"a")
