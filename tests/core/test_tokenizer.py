"""Chat templates against transformers; streamed text equals decoded text.

The tokenizers are of the two kinds that checkpoints use: byte-level (Llama 3, Qwen) and
SentencePiece with byte fallback (Llama 2, Mistral)."""

import itertools
import json
import random
from functools import cache

import pytest
import transformers
from tokenizers import (
    AddedToken,
    ByteLevelBPETokenizer,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Core

from runtime.checkpoint import Checkpoint
from runtime.files import read_json
from runtime.special import MISTRAL_WORDS
from tests.checkpoints import write_json, write_tokenizer
from tests.tables import cells, each, facts
from tokenizer import Tokenizer

WORDS = (
    "the capital of France is Paris and the river runs through it . "
    "Größe naïve 中文 Ελλάδα 🙂 don't 1234 <b>&amp;"
)
TEXTS = [
    "",
    "The capital of France is Paris.",
    "two  spaces\n\n\ttab ",
    "Größe, naïve, 中文字, Ελλάδα",
    "🙂🙃👩\u200d👧 in 🙂 it",
]
SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>", "[INST]", "[/INST]"]


def byte_level():
    core = ByteLevelBPETokenizer()
    core.train_from_iterator([WORDS] * 3, 340, special_tokens=SPECIAL, show_progress=False)
    return core._tokenizer


def sentence_piece():
    pieces = ["<unk>"] + SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁"]
    pieces += sorted(set("abcdefghijklmnopqrstuvwxyzTFPG.,ößï\n文"))
    pieces += ["th", "▁th", "▁the", "▁▁"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    how = dict(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    core = Core(models.BPE(vocab=vocab, merges=merges, **how))
    puts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    core.normalizer = normalizers.Sequence(puts)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    core.add_special_tokens(["<unk>"] + SPECIAL)
    return core


KINDS = {"byte-level": byte_level, "sentence-piece": sentence_piece}


@pytest.fixture(params=KINDS)
def core(request):
    return KINDS[request.param]()


def save(folder, core, files=None, bos=True, **tokenizer_config):
    """Writes a folder with only a tokenizer, and the other `files` by name, and loads it."""
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    core.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>"} | tokenizer_config
    for name, content in ({"tokenizer_config": tokenizer_config} | (files or {})).items():
        if content is not None:
            write_json(folder / f"{name}.json", content)
    return Tokenizer.load(folder)


# Templates with the constructs of each family.
TEMPLATES = {
    "llama-3": """{{- bos_token }}
{%- if tools is not none %}{{ "tools: " + tools | tojson(indent=4) }}{%- endif %}
{{- "Today: " + strftime_now("%d %b %Y") + "\\n" }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n\\n' }}{%- endif %}
""",
    "qwen3": """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is not string %}{%- continue %}{%- endif %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|start|>' + message.role + '\\n' + content + '<|end|>' + '\\n' }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- if tools %}{{- '# Tools' }}{%- endif %}
""",
    "generation": """{{ bos_token }}
{{ messages | tojson }}{{ documents is none }}{{ unknown }}
{% for message in messages %}
    {% if message.role == 'assistant' %}
        {% generation %}
{{ message.content }}
        {% endgeneration %}
    {% else %}
        {%- generation -%}  {{ loop.index }} {{ message.content }}  {%- endgeneration -%}
        {{ "{% generation %}" }}{{ message | tojson(true, 1) }}
    {% endif %}
{% endfor %}{% generation %}{% set inner = 1 %}{{ inner }}{% endgeneration %}{{ inner is defined }}
""",
}


def oracle(folder, template):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


def their_tokenizer(folder):
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture
def of(tmp_path):
    """The byte-level tokenizer with a chat template: of(template, files, **tokenizer_config)."""

    def make(template, files=None, **more):
        return save(tmp_path, byte_level(), files, chat_template=template, **more)

    return make


def loop(body, condition="true"):
    return "{% for m in messages if " + condition + " %}" + body + "{% endfor %}"


def chat_of(system="Be <b>.", user="the one", **more):
    """Turns of these roles, those with a text."""
    turns = dict(system=system, user=user, **more)
    return [dict(role=role, content=text) for role, text in turns.items() if text]


CONVERSATIONS = [
    chat_of(None, " What is <b>the</b> capital? 中文 "),
    chat_of("Be short.", assistant="<think>x</think>\n\nthe two ") + chat_of(None, "the three"),
]
REASONING = ["{{ m.reasoning_content }}{{ m.content }}", "{{ m.thinking }}{{ m | tojson }}"]
REASONS = [
    [*chat_of(None), {"role": "assistant", name: "the two", "content": "the three"}]
    for name in ("reasoning_content", "thinking", "reasoning")
]
FILTERS = ("e", "upper", "wordwrap(9)", "replace('e', 'i')")


LONG = loop("<{{ m.role }}>{{ m.content }}", "m.content | length > 99")


@pytest.mark.parametrize(
    "template, chat",
    [
        *itertools.product(map(loop, REASONING), REASONS),
        *((loop("<{{ m.role }}>{{ m.content | x }}".replace("x", x)), chat_of()) for x in FILTERS),
        (LONG, chat_of(*["the one " * 20] * 2)),
    ],
)
def test_templates_write_reasoning_by_any_name_and_a_changed_or_long_system_text_in_its_turn(
    template, chat, of, tmp_path
):
    tokenizer = of(template)
    text = oracle(tmp_path, template).apply_chat_template(chat, tokenize=False)
    assert tokenizer.render(chat) == text
    assert ("the two" in text) == (chat[-1]["role"] == "assistant")


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_chat_templates_give_the_ids_of_transformers(template, core, tmp_path):
    tokenizer = save(tmp_path, core, chat_template=template)
    reference = oracle(tmp_path, template)
    for messages, prompt in itertools.product(CONVERSATIONS, (True, False)):
        ids = reference.apply_chat_template(
            messages, add_generation_prompt=prompt, return_dict=False
        )
        assert tokenizer.encode_chat(messages, generation_prompt=prompt) == ids


CONTINUED = {
    "llama-3": TEMPLATES["llama-3"],
    "qwen3": TEMPLATES["qwen3"],
    "chatml": "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content | trim + eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + ('model' if m.role == "
    "'assistant' else m.role) + '\n' + m.content | trim + '<|end|>\n' }}{% endfor %}",
}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_final_turn_is_continued_as_by_transformers_or_refused(name, core, tmp_path):
    """Refused are beginnings whose blanks the template trims. (Mistral's writes one in front.)"""
    tokenizer = save(tmp_path, core, chat_template=CONTINUED[name])
    reference = oracle(tmp_path, CONTINUED[name])
    refused = []
    for begin in ("The capital is", "the <b>", "a\n\nb", " the", "the ", "the\n", " ", ""):
        for messages in CONVERSATIONS:
            messages = [*messages, {"role": "assistant", "content": begin}]
            try:
                ids = tokenizer.encode_chat(messages, continue_final_message=True)
            except ValueError as error:
                assert "does not keep the beginning of the answer" in str(error)
                refused.append(begin)
                continue
            assert ids == reference.apply_chat_template(
                messages, continue_final_message=True, return_dict=False
            )
            assert tokenizer.decode(ids).endswith(begin)
    trims = [" the"] * (name != "mistral") + ["the ", "the\n"]
    trims = trims if "trim" in CONTINUED[name] else []
    assert list(dict.fromkeys(refused)) == [*trims, " ", ""]


PARTS = [{"type": "text", "text": "the "}, {"type": "text", "text": "one"}]


@pytest.mark.parametrize("user", ["the one", PARTS])
@pytest.mark.parametrize("system", ["{{ raise_exception('no') }}", "", "{{ m.content }}\n\n"])
def test_a_template_without_system_turn_gets_the_instruction_in_the_first_user_turn(
    system, user, of
):
    """Lists of text parts are joined."""
    template = "{% if m.role == 'system' %}SYSTEM{% else %}<user>{{ m.content }}{% endif %}"
    tokenizer = of(loop(template.replace("SYSTEM", system)))
    assert tokenizer.has_system_turn == ("content" in system)
    chat = chat_of(PARTS if user is PARTS else "the one", user)
    expected = "the one\n\n<user>the one", "<user>the one\n\nthe one"
    assert tokenizer.render(chat) == expected["content" not in system]


def test_only_the_first_chat_of_its_roles_is_tried_with_other_texts(of, monkeypatch):
    condition = "m.role == 'user' or m.role == 'assistant' and m.content | length > 3"
    tokenizer = of(loop("{{ m.content }}", condition))
    fill, fills = tokenizer.fill, []
    monkeypatch.setattr(tokenizer, "fill", lambda *args, **kw: fills.append(1) or fill(*args, **kw))
    for number in range(3):
        chat = chat_of(None, f"user {number}", assistant=f"assistant {number}")
        before = len(fills)
        assert tokenizer.render(chat) == f"user {number}assistant {number}"
        assert (len(fills) == before + 1) == (number > 0)
        with pytest.raises(ValueError, match="omits message 3, whose role is 'tool'"):
            tokenizer.render([*chat, dict(role="tool", content="42")])
    with pytest.raises(ValueError, match="omits message 2, whose role is 'assistant'"):
        tokenizer.render(chat_of(None, "user", assistant="no"))


REFUSED = """
User: {% for part in messages[0].parts %}{% endfor %} | omits message 1, whose role
{{ messages[0].content }} | omits message 2, whose role is 'user'
{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %} | omits message 3, \
whose role is 'assistant'
"""


@each("template, words", REFUSED)
def test_a_template_that_omits_a_message_is_refused(template, words, of):
    with pytest.raises(ValueError, match=words):
        of(template).render(CONVERSATIONS[1])


CHANGES = ["{{ m.content[:3] }}", "{{ m.content | upper }}", "{{ m | tojson }}{{ m.content }}"]


@pytest.mark.parametrize("body", CHANGES)
def test_a_template_that_changes_the_beginning_of_an_answer_is_refused(body, of):
    chat = chat_of(None, None, assistant="the river")
    words = "does not keep the beginning of the answer, 'the river'"
    with pytest.raises(ValueError, match=words):
        of(loop(body)).render(chat, continue_final_message=True)


def test_arguments_and_parts_that_a_template_does_not_read_are_refused(of):
    with pytest.raises(ValueError, match="the chat template has no argument 'thinking'"):
        of(TEMPLATES["qwen3"]).render(chat_of(), template_args={"thinking": 1})
    for part in {"type": "image", "text": "x"}, {"type": "text"}, "x":
        with pytest.raises(ValueError, match="only texts are read"):
            of(loop("{{ m.content }}")).render(chat_of(None, [*PARTS, part]))


def test_plain_text_has_the_bos_of_the_tokenizer_once_and_answers_have_none(core, tmp_path):
    core.enable_truncation(4)  # the settings of a training run have no effect
    core.enable_padding(length=64)
    assert 0 not in save(tmp_path, core, bos=False).encode("the river runs")
    tokenizer = save(tmp_path, core)
    ids = tokenizer.encode("the river runs")
    assert tokenizer.decode(ids) == "the river runs"
    assert tokenizer.encode("the river runs", bos=False) == ids[1:]
    assert tokenizer.encode("") == ids[:1] == [tokenizer.bos_id] == [core.token_to_id("<s>")]
    assert tokenizer.encode("<s>the").count(tokenizer.bos_id) == 1


def test_streamed_pieces_are_whole_characters_and_join_to_the_text(core, tmp_path):
    """The ids are those of texts, and random ones: special tokens and unknown ids have no text."""
    # As in the first Llama.
    core.add_special_tokens([AddedToken("<s>", normalized=True, special=True)])
    tokenizer = save(tmp_path, core)
    n_ids = core.get_vocab_size()
    for text in TEXTS + [WORDS, "中文 the 🙂 " * 30]:
        ids, stream = tokenizer.encode(text), tokenizer.stream()
        pieces = [stream.push(i) for i in [*ids, *tokenizer.eos_ids, n_ids, 2**31]]
        assert "\ufffd" not in "".join(pieces) and "".join(pieces) + stream.end() == text
        assert text != WORDS or sum(map(bool, pieces)) > len(ids) / 4  # it streams before the end
    dice = random.Random(1)
    for n in [3, 40, 150] * 10:
        ids = [dice.randrange(dice.choice([300, n_ids + 20])) for _ in range(n)]
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.end() == tokenizer.decode(ids)


def test_a_stream_ends_before_a_stop_string_and_returns_nothing_that_may_become_one(core, tmp_path):
    tokenizer, pieces = save(tmp_path, core), []
    stream = tokenizer.stream(stop=("\n\nQ:", "END"))
    for token in tokenizer.encode("a\n\nb ENE\n\nQ: c END"):
        pieces.append(stream.push(token))
        assert "a\n\nb ENE".startswith("".join(pieces)) and stream.text == "".join(pieces)
        if stream.ended:
            break
    assert "".join(pieces) + stream.end() == stream.text == "a\n\nb ENE"
    assert stream.ended and any(pieces[:-1])
    both = tokenizer.stream(stop=("e", "h"))  # in one token
    text = "".join(map(both.push, tokenizer.encode("the", bos=False)))
    assert text.strip() == "t" and both.ended and both.end() == ""
    unfinished = tokenizer.stream(stop=("END",))
    text = "".join(map(unfinished.push, tokenizer.encode("an E", bos=False)))
    assert "E" not in text and text + unfinished.end() == "an E" and not unfinished.ended
    special = tokenizer.stream(stop=("END", "<|end|>"))
    *before, end = tokenizer.encode("an E<|end|>", bos=False)
    text = "".join(map(special.push, before))
    assert not special.ended and special.push(end) == "" and special.ended
    assert text + special.end() == special.text == "an E" and special.ended
    with pytest.raises(ValueError, match="can only be the special token <|end|>"):
        tokenizer.stream(stop=("<|end|>\n",))


# generation_config.json, eos_token of the tokenizer, eos_token_id of config.json → the end tokens.
ENDS = """
{"eos_token_id": [7, 9]} | "</s>" | [9, 5] | [7, 9, 1, 5]
{"eos_token_id": -1} | "</s>" | 5 | [1, 5]
{} | {"content": "</s>", "lstrip": false} | 5 | [1, 5]
null | "<no-such-token>" | 0 | [0]
"""  # −1 is none, as in transformers


@each("row", ENDS)
def test_end_tokens_are_those_of_the_generation_config_the_tokenizer_and_the_config(row, tmp_path):
    generation, token, of_config, eos = map(json.loads, row)
    files = {"generation_config": generation, "config": {"eos_token_id": of_config}}
    tokenizer = save(tmp_path, byte_level(), files, eos_token=token)
    assert [*tokenizer.eos_ids] == eos
    assert Checkpoint(tmp_path).special_ids == (tokenizer.bos_id, (*eos,), (*eos,))
    assert Tokenizer.load(tmp_path, eos_ids=[4]).eos_ids == (4,)


LISTED = ("<|tool|>", "<|pad|>", "<|turn|>", "<|plain|>")


@pytest.mark.parametrize("file", ["added_tokens_decoder", "added_tokens", "vocabulary"])
def test_tokens_that_only_other_files_list_are_read_as_by_transformers(file, tmp_path):
    core = byte_level()
    first = core.get_vocab_size()
    content = json.loads(core.to_str())
    content["added_tokens"] = []
    more = dict(eos_token="<|turn|>", pad_token="<|pad|>")
    files = {}
    if file == "added_tokens_decoder":
        flags = dict(lstrip=True, rstrip=False, normalized=False, single_word=False)
        tokens = enumerate([token.content for token in core.get_added_tokens_decoder().values()])
        tokens = [*tokens, *enumerate(LISTED, first)]
        more[file] = {
            str(i): dict(content=text, special=text not in ("<|turn|>", "<|plain|>"), **flags)
            for i, text in reversed(tokens)
        }
    elif file == "added_tokens":
        files[file] = {text: i for i, text in enumerate(LISTED, first)}
        more["additional_special_tokens"] = ["<|tool|>"]
        files["special_tokens_map"] = dict(eos_token="<|turn|>")
        more["eos_token"] = "</s>"  # the other file takes precedence
    else:
        content["model"]["vocab"] |= {text: i for i, text in enumerate(LISTED, first)}
        more["extra_special_tokens"] = {"tool_token": "<|tool|>"}
    tokenizer = save(tmp_path, Core.from_str(json.dumps(content)), files, bos=False, **more)
    theirs = their_tokenizer(tmp_path)
    text = f"<s>the {' river '.join(LISTED)} end"
    ids = tokenizer.encode(text)
    assert ids == theirs(text).input_ids and {first + 1, first + 2} < {*ids}
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert tokenizer.eos_ids == (first + 2,)
    assert Checkpoint(tmp_path).special_ids[1:] == ((first + 2,), (first + 1,))


@pytest.mark.parametrize("split", [False, True])
def test_special_tokens_in_a_text_are_split_if_the_configuration_says_so(split, core, tmp_path):
    tokenizer = save(tmp_path, core, split_special_tokens=split)
    ids = tokenizer.encode("the <|end|> river")
    assert ids == their_tokenizer(tmp_path)("the <|end|> river").input_ids
    assert (core.token_to_id("<|end|>") in ids) != split


def test_a_contradiction_about_the_first_space_is_refused(core, tmp_path):
    """transformers follows one file or the other, by the class of the tokenizer."""
    adds = core.normalizer is not None
    for value in adds, None:
        save(tmp_path, core, add_prefix_space=value)
    words = f"add_prefix_space is {'false' if adds else 'true'}, but tokenizer.json puts"
    with pytest.raises(ValueError, match=words):
        save(tmp_path, core, add_prefix_space=not adds)


@cache
def mistral(pattern):
    """A tokenizer of more than 100,000 tokens with the words of ENGLISH, but for " NaOH"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    merges = []
    for word in "The Ġp Ġof ĠNa OH Ġin Ġm Ġat Ġe Bay Ġand ĠGit Hub".split():
        merges += [(word[:i], word[i]) for i in range(1, len(word))]
    merges += [("Ġp", "H"), ("Ġm", "L"), ("Ġe", "Bay"), ("ĠGit", "Hub")]
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))
    for i in range(100_001):
        vocab[f"<{i}>"] = len(vocab)
    core = Core(models.BPE(vocab=vocab, merges=merges))
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([words, spell])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    return core


ENGLISH = "The pH of NaOH, in mL, at eBay and GitHub"
PLAIN_WORDS = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
# Pattern, config.json, tokenizer_config.json → the number of tokens, whether there is a warning.
MISTRALS = """
plain | model_type="mistral" transformers_version="4.50.0.dev0" |  | 13 | yes
plain | model_type="mistral" transformers_version="4.50.0.dev0" | fix_mistral_regex=true | 17 | no
plain | model_type="mistral" |  | 13 | yes
plain | model_type="mistral" transformers_version="5.0.0" | fix_mistral_regex=true | 13 | no
plain | model_type="llama" transformers_version="4.50.0.dev0" | fix_mistral_regex=true | 13 | no
mistral | model_type="mistral" transformers_version="4.50.0.dev0" |  | 17 | no
"""


@each("pattern, config, settings, tokens, warned", MISTRALS)
def test_mistrals_wrong_pattern_of_words_is_a_warning_or_corrected_as_by_transformers(
    pattern, config, settings, tokens, warned, tmp_path, recwarn
):
    core = mistral(PLAIN_WORDS if pattern == "plain" else MISTRAL_WORDS)
    tokenizer = save(tmp_path, core, {"config": facts(config)}, bos=False, **facts(settings))
    ids = tokenizer.encode(ENGLISH)
    assert ids == their_tokenizer(tmp_path)(ENGLISH).input_ids and len(ids) == int(tokens)
    assert tokenizer.decode(ids) == ENGLISH
    warnings = [str(w.message) for w in recwarn]
    assert any('add "fix_mistral_regex": true' in text for text in warnings) == (warned == "yes")


PARTS_ALONE = """{% for m in messages %}{{ m['role'] | capitalize }}
{%- if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}
{%- for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}
{%- elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


def test_a_template_that_writes_only_parts_gets_texts_as_parts(of):
    refuse = "{% if messages[0].content is string %}{{ raise_exception('x') }}{% endif %}"
    for template in PARTS_ALONE, refuse + PARTS_ALONE:
        tokenizer = of(template)
        text = "System: Be short.<end>\nUser: the one<end>\nAssistant:"
        assert tokenizer.has_system_turn and tokenizer.render(chat_of("Be short.", PARTS)) == text


# `chat_template` of tokenizer_config.json, and files. U: {{ messages[0].content }}
NAMED = """
[{"name": "default", "template": "1U"}, {"name": "x", "template": "2U"}] | {}
{"default": "1U", "tool_use": "2U"} | {}
"2U" | {"chat_template.jinja": "1U"}
null | {"chat_template.jinja": "2U", "additional_chat_templates/default.jinja": "1U", \
    "additional_chat_templates/tool_use.jinja": "3U"}
"""


@each("setting, files", NAMED.replace("U", "{{ messages[0].content }}"), cells)
def test_the_default_of_named_templates_is_that_of_transformers(setting, files, tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ours = save(tmp_path, byte_level(), chat_template=setting)
    text = their_tokenizer(tmp_path).apply_chat_template(CONVERSATIONS[0], tokenize=False)
    assert ours.render(CONVERSATIONS[0]) == text == "1" + CONVERSATIONS[0][0]["content"]


@pytest.mark.parametrize("tokenizer_class", [None, "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("value, expected", [(..., None), (None, "the one"), ("<s>", "<s>the one")])
def test_a_token_that_only_the_tokenizers_class_sets_is_refused_where_the_template_writes_it(
    value, expected, tokenizer_class, tmp_path
):
    """Qwen2's is that of the model type, whatever class the file names."""
    more = {} if value is ... else {"unk_token": value}
    more |= {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    files = {"config": {"model_type": "qwen2"}}
    template = "{{ unk_token }}{{ messages[0].content }}{{ pad_token if nothing }}"
    tokenizer = save(tmp_path, byte_level(), files, chat_template=template, **more)
    chat = chat_of(None)
    if expected:
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        text = theirs.apply_chat_template(chat, tokenize=False)
        assert tokenizer.render(chat) == text == expected
    else:
        with pytest.raises(ValueError, match="the chat template writes unk_token, but"):
            tokenizer.render(chat)


def panicking_tokenizer():
    """tokenizer.json that makes the tokenizers library panic."""
    content = json.loads(byte_level().to_str())
    content["model"]["vocab"]["he"] = len(content["model"]["vocab"])
    content["model"] |= dict(continuing_subword_prefix="Ġ", merges=[["h", "e"]])
    return json.dumps(content)


DAMAGED = """
tokenizer.json | MISSING | tokenizer.json is missing
tokenizer.json | PANIC | cannot read
tokenizer_config.json | { | tokenizer_config.json is not valid JSON
tokenizer_config.json | {"bos_token": 1.0} | bos_token is 1.0; it must be a text
tokenizer_config.json | {"added_tokens_decoder": {"7": {"content": "<a>"}}} | '<a>' is listed \
as 7, but is 340
tokenizer_config.json | {"extra_special_tokens": ["<a>"]} | _config.json: .*'<a>' is special, but
added_tokens.json | {"<a>": Infinity} | cannot read the added tokens
tokenizer_config.json | {"chat_template": [{"name": "rag", "template": "x"}]} | chat_template must \
be a text
tokenizer_config.json | {"chat_template": [{"name": ["x"]}]} | chat_template must be a text
tokenizer_config.json | {"chat_template": {"default": null}} | no chat template, like most
generation_config.json | {"eos_token_id": [1, null]} | eos_token_id is
chat_template.jinja |  | no chat template, like most base models: use plain text
chat_template.jinja | {{ raise_exception('no\\nlines') }} | no lines
chat_template.jinja | {{ messages.append(1) }} | unsafe
chat_template.jinja | {{ bos_token }}hello | writes bos_token '<bos>', which is not in \
tokenizer.json
chat_template.jinja | <bos>hello | writes bos_token '<bos>', which is not in tokenizer.json
chat_template.jinja | {{ '%10000000d' % 1 }}{{ messages }} | a text of 1000
chat_template.jinja | {{ messages[0].content }}{{ messages[1].content }} | half of a surrogate pair
"""


@each("name, content, words", DAMAGED)
def test_a_damaged_file_or_a_template_that_fails_or_leaves_the_sandbox_is_one_line(
    name, content, words, tmp_path, capfd
):
    save(tmp_path, byte_level(), bos=False, bos_token="<bos>", pad_token="<pad>")
    (tmp_path / name).unlink(missing_ok=True)
    if content != "MISSING":
        (tmp_path / name).write_text(panicking_tokenizer() if content == "PANIC" else content)
    messages = chat_of(None, "a <pad>") + chat_of(None, "\ud800")
    with pytest.raises((ValueError, OSError), match=words) as error:
        Tokenizer.load(tmp_path).encode_chat(messages)
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""


def test_a_post_processor_that_adds_an_absent_token_is_refused_in_words(tmp_path):
    """The library panics when it encodes, not when it reads the file."""
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    content = read_json(path)
    single = [{"SpecialToken": {"id": "<gone>", "type_id": 0}}]
    single.append({"Sequence": {"id": "A", "type_id": 0}})
    kind = {"type": "TemplateProcessing", "single": single, "pair": single}
    write_json(path, content | {"post_processor": kind | {"special_tokens": {}}})
    with pytest.raises(ValueError, match=f"tokenizers .* cannot read {path}"):
        Tokenizer.load(tmp_path)
