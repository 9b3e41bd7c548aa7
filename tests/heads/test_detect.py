"""Detection of retrieval heads: scores, prompts, resuming, the command line.

Sources of generated tokens."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM

from cli import detect as program
from cli import models
from cli.options import MINIATURE
from decore import DeCoRe, generate
from heads import FOLDER, ablation, detect, load_heads, measures, needles, words
from heads.sources import find_sources
from runtime.files import read_json
from tests.checkpoints import (
    assert_close,
    random_ids,
    read_lines,
    stand_in,
    tiny,
    write_checkpoint,
    write_json,
    write_lines,
    write_tokenizer,
)
from tests.conftest import TEMPLATE
from tests.tables import cells, each
from tokenizer import Tokenizer

NEEDLE = needles.Needle(
    "The night watch hid the keys under the blue stone.",
    "Where did the night watch hide the keys?",
    "under the blue stone",
)
BOOKS = needles.read_haystack(needles.HAYSTACK)


@pytest.fixture(scope="module")
def tokenizer(chat_model):
    return Tokenizer.load(chat_model)


def load_reference(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)


@torch.no_grad()
def reference_run(reference, prompt, needle, steps, published):
    """The definitions, with transformers: complete sequences, attention matrices, values.

    Returns the scores of each measure and the generated ids."""
    c = reference.config
    L, H, G = c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads
    start, end = needle
    span = prompt[start:end]
    copied = [[] for _ in range(L * H)]
    generated, write, mass, values = [], [], [], []
    projections = []
    for layer in reference.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, v: values.append(v[0]))
        projections.append(layer.self_attn.o_proj.weight.unflatten(1, (H, -1)))  # [D, H, K]
    for _ in range(steps):
        ids = prompt + generated
        values.clear()
        out = reference(torch.tensor([ids]), output_attentions=True)
        token = int(out.logits[0, -1].argmax())
        generated.append(token)
        p = torch.stack(out.attentions)[:, 0, :, -1]  # [L, H, C]
        for copies, at in zip(copied, p.argmax(-1).flatten().tolist(), strict=True):
            copies += [token] * (start <= at < end and ids[at] == token)
        if token in span:
            v = torch.stack(values).unflatten(-1, (G, -1)).repeat_interleave(H // G, 2)
            u = reference.lm_head.weight[token]
            phi = torch.einsum("lhc,lchk,ldhk,d->lhc", p, v, torch.stack(projections), u)
            of_needle = phi[..., start:end].sum(-1)
            ratio = len(span) / (len(ids) - len(span))
            write.append(of_needle - ratio * (phi.sum(-1) - of_needle))
            mass.append(p[..., start:end].sum(-1))
    count = list if published else set
    copy = [len(count(tokens)) / len(count(span)) for tokens in copied]
    return dict(
        copy=torch.tensor(copy).double().view(L, H),
        write=torch.stack(write).mean(0),
        mass=torch.stack(mass).mean(0),
    ), generated


def score_run(model, prompt, needle, max_new_tokens, eos_ids=(), published=False):
    """({measure: scores of all heads}, the generated ids) of one run."""
    how = [needle], max_new_tokens, eos_ids, published
    [answer] = measures.answer_batch(model, [prompt], *how)
    return measures.head_scores(answer, prompt, needle, published), answer.ids


@pytest.mark.parametrize("family", ["llama3-iti", "mistral-window", "qwen2", "qwen3"])
def test_a_run_scores_heads_by_the_definitions_and_pairs_a_token_with_the_step_that_generates_it(
    tmp_path, engine, family
):
    published = family == "qwen2"
    model = engine.load(write_checkpoint(tmp_path, family, family == "qwen3", vocab_size=12))
    # Ids 3 … 11 only, so no answer contains them all.
    prompt, needle = random_ids(40, vocab_size=12), (0, 36)
    reference = load_reference(tmp_path, torch.float64)
    expected, ids = reference_run(reference, prompt, needle, 16, published)
    found, generated = score_run(model, prompt, needle, 16, published=published)
    assert generated == ids
    for measure, scores in expected.items():
        assert scores.max() > 0
        of_run = detect.score_run(model, prompt, needle, 16, (), published, measure)
        assert of_run[1] == ids and torch.equal(of_run[0], found[measure])
        assert_close(found[measure], scores, 1e-5, 1e-5)  # found in float32
    # Padding changes nothing.
    short = random_ids(23, vocab_size=12, seed=1)
    batch = measures.answer_batch(model, [short, prompt], [(2, 9), needle], 5)
    for answer, text, span in zip(batch, (short, prompt), ((2, 9), needle)):
        [alone] = measures.answer_batch(model, [text], [span], 5)
        assert answer.ids == alone.ids
        assert_close(answer[1:], alone[1:], 1e-5, 1e-5)


def test_an_answer_ends_with_an_end_token_or_the_complete_needle_unless_published(tmp_path):
    model = tiny(tmp_path, "qwen2", vocab_size=8)
    prompt = random_ids(40, vocab_size=8)
    ids = score_run(model, prompt, (1, 2), 12, published=True)[1]
    assert ids == [0, 4, 6, 1, 3, 4, 6, 1, 3, 6, 0, 4]
    assert score_run(model, prompt, (0, 40), 12, (6,))[1] == ids[:3]
    # needles: 3; 6, 6; 4, 3, 4; 7
    for span, end in (((1, 2), 5), ((2, 4), 7), ((16, 19), 6), ((0, 1), 12)):
        assert score_run(model, prompt, span, 12)[1] == ids[:end]


@pytest.mark.parametrize("family", ["llama3", "mistral-window"])
def test_sources_are_where_transformers_puts_the_largest_probability(tmp_path, family):
    heads = [(0, 1), (1, 0), (2, 2), (2, 3)]
    model = tiny(tmp_path, family)
    for prompt in (random_ids(21, seed=1), random_ids(1, seed=2)):
        ids = generate(model, prompt, DeCoRe(heads), max_new_tokens=19, eos_ids=()).ids
        complete = torch.tensor([prompt + ids[:-1]])
        with torch.no_grad():
            layers = load_reference(tmp_path)(complete, output_attentions=True).attentions
        for special in (), prompt[:9]:
            sources = find_sources(model, prompt, ids, heads, special)
            for t, places in enumerate(sources, len(prompt) - 1):
                tops = [int(layers[i][0, head, t, : len(prompt)].argmax()) for i, head in heads]
                tops = [top for top in tops if prompt[top] not in special]
                assert dict(places) == {top: tops.count(top) / len(tops) for top in tops}
                shares = [share for _, share in places]
                assert shares == sorted(shares, reverse=True)


def put(tokenizer, books, length, depth=50, item=NEEDLE, **facts):
    """(the ids before the needle's first, its text, those after it, its real depth) of a prompt."""
    facts = dict(template=needles.TEMPLATE, template_args=None, seed=0) | facts
    if isinstance(books, list):
        books = needles.make_book(tokenizer, books, 0, length)
    sample = needles.Sample(0, length, depth, 0)
    ids, span, at = needles.make_prompt(sample, item, books, tokenizer, facts)
    assert 0.9 * length < len(ids) <= length and abs(at - depth) <= needles.NEAR
    text = tokenizer.core.decode(ids, skip_special_tokens=False)
    return ids, tokenizer.decode(ids[slice(*span)]), at, *text.split(item.needle)


@pytest.mark.parametrize("template_args", [None, {}])
@pytest.mark.parametrize("depth", [0, 33, 100])
def test_the_needle_is_between_sentences_near_its_depth_and_its_tokens_are_its_text(
    tokenizer, depth, template_args
):
    book = needles.make_book(tokenizer, BOOKS, 0, 3000)
    facts = dict(template="Text: " + needles.TEMPLATE, template_args=template_args)
    prompt = put(tokenizer, book, 3000, depth, **facts)
    _, needle, at, before, after = prompt
    assert re.search(r'([.!?]"?\s+|: ?|^)$', before)
    assert re.match(r"\s", after) and needle == NEEDLE.real_needle
    if depth == 33:
        assert put(tokenizer, book, 3000, depth, **facts, seed=1)[2] != at
    # A prompt that is too long loses sentences until it fits: all of them if the estimate of its
    # tokens is too low.
    too_low = book[0], [(bounds[:60], [0] * 60) for bounds, _ in book[1]]
    assert put(tokenizer, too_low, 3000, depth, **facts) == prompt


HAYSTACKS = r"""
"Река течёт к морю. " | "морю\\."
"नदी समुद्र की ओर बहती है। " | "है।"
"แม่น้ำไหล ลงสู่ทะเล " | ""
"the river runs to the sea. " | "sea\\."
"the river runs to the sea\n" | "sea"
"""


@each("text, end", HAYSTACKS, cells)
def test_a_haystack_of_any_script_fills_the_prompt(tokenizer, text, end):
    _, needle, _, before, _ = put(tokenizer, [text * 9], 1500)
    assert needle == NEEDLE.real_needle and re.search(rf"{end}\s+$", before)


def test_a_haystack_without_sentences_is_refused(tokenizer):
    with pytest.raises(ValueError, match="the prompt of 1500 tokens .* has 165; give other"):
        put(tokenizer, ["river" * 9000], 1500)


def test_a_needle_is_located_also_after_letters_whose_small_ones_are_longer(tokenizer):
    """ "İ".lower() is two characters."""
    real = "MAVİ TAŞIN ALTINDA"
    item = needles.Needle("İİİİ: anahtarlar mavi taşın altında.", "Nerede?", real)
    assert put(tokenizer, BOOKS, 500, item=item)[1] == "mavi taşın altında"


def test_abbreviations_and_initials_do_not_end_a_sentence():
    text = 'Mr. Green met Dr. A. Stone. "Why?" He left at 3.30 p.m. sharp! 他走了。她没有。'
    starts = [text[match.end() :][:4] for match in needles.SENTENCE_END.finditer(text)]
    assert starts == ['"Why', "He l", "她没有。", ""]


def test_short_haystacks_continue_with_the_next_text_and_then_repeat(tokenizer):
    books = ["One is here. ", "Two is here. ", "Three is here."]
    text, *_ = needles.make_book(tokenizer, books, 1, 5)
    assert text.startswith("Two is here. \n\nThree is here.\n\nOne is here. \n\nTwo is here.")


def test_the_plan_is_the_complete_grid_or_draws_needles_in_turn():
    assert [(s.length, s.depth) for s in needles.plan_runs(1, 3, [10, 20], 3)] == [
        (length, depth) for length in (10, 20) for depth in (0, 50, 100)
    ]
    drawn = needles.plan_runs(4, 2, [10, 20], 3, runs=10, seed=1)
    assert len(set(drawn)) == 10 and drawn == sorted(drawn)
    assert sorted(s.needle for s in drawn) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert all(s.book == s.needle % 2 for s in drawn)
    assert drawn != needles.plan_runs(4, 2, [10, 20], 3, runs=10, seed=2)


def test_the_published_position_is_by_tokens_at_the_full_stop_before_the_depth(
    tmp_path, monkeypatch
):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    begin = ("<|begin|>", tokenizer.core.token_to_id("<|begin|>"))
    tokenizer.core.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[begin]
    )
    text, needle = "Aaaa bbb. " * 9, needles.Needle("N n.", "q?", "N n.")
    question = "Based on the content of the book, Question: q?\nAnswer:"

    def published(depth, length=400, needle=needle):
        sample = needles.Sample(0, length, depth, 0)
        ids, span, _ = needles.make_published_prompt(sample, needle, text, tokenizer)
        prompt = tokenizer.core.decode(ids, skip_special_tokens=False).replace("<|begin|>", "^")
        return prompt, tokenizer.decode(ids[slice(*span)]) if span != (-1, -1) else None

    # 400 tokens less 200 for question and answer less five of the needle: two beginnings and 193
    # letters.
    context = (text * 9)[:193]
    assert published(100) == (f"^^^{context}^N n.{question}", "N n.")
    # In another vocabulary no token is a full stop.
    assert published(50) == (f"^^N n.^^{context}{question}", "N n.")
    stop = tuple(tokenizer.core.encode(".", add_special_tokens=False).ids)
    monkeypatch.setattr(needles, "FULL_STOPS", stop)
    for depth, at in ((50, 89), (11, 19)):
        expected = f"^^^{context[:at]}^N n.{context[at:]}{question}"
        assert published(depth) == (expected, "N n.")
    # The shortest of the authors' 20 lengths.
    assert published(50, length=0) == (f"^^N n.{question}", "N n.")
    # The needle's tokens are the first window with its token set. A needle that is not located has
    # no scores.
    assert published(50, needle=needle._replace(real_needle="xz"))[1] is None
    zeros = torch.zeros(2, 1, 1, dtype=int)
    nowhere = measures.Answer([5, 6], zeros, zeros, zeros)
    assert not any(measures.head_scores(nowhere, [5, 6], (-1, -1), published=True).values())
    assert published(100, needle=needle._replace(needle="N n.", real_needle="aA"))[1] == "Aa"


def test_texts_and_needles_are_read_from_files(tmp_path):
    lines = write_lines(tmp_path / "texts.jsonl", [{"text": "One. "}, {"text": "Two."}])
    assert needles.read_haystack(lines) == ["One.", "Two."]
    (tmp_path / "part1").mkdir()
    for name in ("part2.txt", "part1/p1.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    assert needles.read_haystack(tmp_path) == ["part1/p1.txt", "part2.txt"]


@pytest.fixture
def prepare(chat_model, monkeypatch):
    """The facts and the prompts of options on the tiny model."""

    def run(options):
        argv = shlex.split(f"detect --model {chat_model} --out x {options}")
        monkeypatch.setattr(sys, "argv", argv)
        args = program.parse_args()
        items = needles.read_needles(args.needles)
        checkpoint = models.read_model(args.model, args)
        facts = program.make_facts(args, checkpoint, items, BOOKS)
        return facts, needles.make_prompts(facts, items, BOOKS, checkpoint.tokenizer)

    return run


def test_the_default_lengths_fit_the_context_and_published_ones_are_as_given(prepare, tokenizer):
    assert prepare("--depths 1")[0]["lengths"] == [400, 800, 1199, 1598, 1998]
    facts, prompts = prepare("--published --lengths 0:1900:20 --depths 1")
    assert facts["lengths"] == list(range(0, 1901, 100)) and len(prompts) == 60
    for ids, record in prompts:
        text = tokenizer.decode(ids)
        assert record["length"] < 400 or BOOKS[record["needle"]][:20] in text
        assert text.count("Based on the content of the book, Question: ") == 1


def test_runs_that_would_repeat_a_prompt_are_left_out_with_a_warning(prepare, recwarn):
    prepare("--lengths 1500 --depths 2")
    assert not recwarn
    with pytest.warns(UserWarning, match="13 runs instead of 15"):
        facts, prompts = prepare(f"--depths 1 --model {MINIATURE}")
    assert facts["lengths"] == [154, 167, 180, 193, 206]
    assert facts["template"] == needles.TEMPLATE
    assert len({tuple(ids) for ids, _ in prompts}) == len(prompts) == 13


def test_thinking_is_off_by_default_and_the_facts_say_so(prepare, chat_model, tmp_path):
    off = "{% if enable_thinking is false %}<think></think>{% endif %}"
    model = shutil.copytree(chat_model, tmp_path / "model")
    core = Tokenizer.load(write_tokenizer(model, TEMPLATE + off)).core
    options = "--lengths 500 --depths 1 --template '{context}\\n{question}'"
    for end, thinks, more in (
        ("<think></think>", False, ""),
        ("assistant:", True, """--template-args '{"enable_thinking": true}'"""),
    ):
        facts, [(ids, _), *_] = prepare(f"{options} --model {model} {more}")
        assert core.decode(ids, skip_special_tokens=False).endswith(end)
        assert facts["template_args"] == {"enable_thinking": thinks}
        assert facts["template"] == "{context}\n{question}"


def test_right_answers_recall_more_than_half_and_published_ones_end_at_two_ids_only(
    prepare, tokenizer, monkeypatch
):
    def answer_batch(model, prompts, spans, max_new_tokens, stops, published):
        assert set(stops) == ({144, None} if published else {257})  # the vocabulary has no "<0x0A>"
        zeros = [torch.zeros(len(text), 1, 1, dtype=int) for text in texts]
        return [measures.Answer(tokenizer.encode(text), x, x, x) for text, x in zip(texts, zeros)]

    monkeypatch.setattr(measures, "answer_batch", answer_batch)
    for more in "", "--published":
        facts, prompts = prepare(f"--lengths 500 --depths 1 {more}")
        texts = ["The stones under", "under the", "I do not know"]  # recall 0.75, 0.5, 0
        answered = detect.answer_runs(None, tokenizer, prompts, [NEEDLE] * 3, facts)
        assert [record["right"] for record, _ in answered] == [True, False, False]


SCRIPTS = """
在蓝色的石头下面 | 钥匙在蓝色石头下面。 | 钥匙在红盒子里。
青い石の下 | 鍵は青い石の下です | 鍵は箱の中です
ใต้หินสีน้ำเงิน | กุญแจอยู่ใต้หินสีน้ำเงิน | ไม่ทราบ
под синим камнем | Они Под Синим камнем. | Они на синей полке под дверью.
κάτω από την πέτρα | ΚΆΤΩ ΑΠΌ ΤΗΝ ΠΈΤΡΑ | πάνω στην πέτρα
नीले पत्थर के नीचे | चाबी नीले पत्थर के नीचे है। | चाबी नीली नदी में है।
تحت الحجر الأزرق | المفتاح تحت الحجر الأزرق. | المفتاح في الصندوق
१९९९ | सन् १९९९ | सन् १९९८
"""


@each("needle, right, wrong", SCRIPTS)
def test_a_needle_of_any_script_is_found(needle, right, wrong):
    assert detect.recall_of(needle, right) > detect.SUCCESS
    assert detect.recall_of(needle, wrong) <= detect.SUCCESS
    assert detect.recall_of(needle, right, published=True) == 0


def test_a_needle_of_latin_letters_is_compared_as_published():
    for needle, answer in (("hidden keys", "the key hides"), ("Café Zoë", "caf zo"), ("7 m²", "7")):
        assert words.is_latin(needle)
        assert detect.recall_of(needle, answer) == detect.recall_of(needle, answer, True) > 0


TEXTS = MINIATURE / "detection"
OWN_TEXTS = "--template 'Context: {context}\\n{question}' --max-new-tokens 9"
OWN_TEXTS += f" --needles {TEXTS}/needles.jsonl --haystack {TEXTS}/haystack.jsonl"
LONG = f"{OWN_TEXTS} --lengths 60:240:5 --max-new-tokens 12"  # as for heads/scores/miniature.json
SHORT = f"{OWN_TEXTS} --lengths 60:120:2 --runs 8 --batch-size 3"


def test_the_bar_of_a_detection_moves_with_each_token(call, moves, tmp_path):
    for more, answers in ("", 1), ("--masked 2", 1 + 4 + 3):
        moves.clear()
        call(program.main, f"{SHORT} --eos 0 --out {tmp_path}/{answers} {more}")
        assert sum(moves) == pytest.approx(8)
        steps = [n for n in moves if 0 < n <= 3 / 9]
        assert len(steps) >= 3 * answers * 5


def test_an_interrupted_detection_continues_and_a_finished_one_is_kept(
    call, done, refused, tmp_path, monkeypatch
):
    path, runs = tmp_path / "heads.json", tmp_path / "heads.json.runs.jsonl"
    runs.touch()  # killed before the facts were written
    err = refused(program.main, f"{SHORT} --min-success 9 --out {path}")
    assert "of 8 answers are right (--min-success 9)" in err
    assert not path.exists()
    header, *lines = runs.read_bytes().splitlines(keepends=True)
    # Shows below that stored runs are not repeated.
    lines[0] = lines[0].replace(b'"recall": 1.0, "right": true', b'"recall": 0.0, "right": false')
    for stored_lines in ([*lines[:4], lines[4][:-9]], lines):
        runs.write_bytes(b"".join([header, *stored_lines]))
        out, _ = done(program.main, f"{SHORT} --min-success 4 --out {path}")
        assert out.endswith(f"wrote {path}\n")
        assert runs.read_bytes().startswith(b"".join([header, *stored_lines[:4]]))
        for line, text in zip(runs.read_bytes().splitlines()[1:], lines, strict=True):
            run, expected = json.loads(line), json.loads(text)
            for measure in ("write", "mass", "effect"):  # other batches round differently
                assert run.pop(measure) == pytest.approx(expected.pop(measure), abs=1e-5)
            assert run == expected
    content, records = read_json(path), [json.loads(line) for line in lines]
    assert {*load_heads(stand_in(4, 8, "miniature"), 3, path)} == {(2, 0), (2, 1), (3, 1)}
    right = [record["scores"].get("2-0", 0) for record in records if record["recall"] > 0.5]
    assert (content["samples"], len(right), content["success_rate"]) == (7, 7, 0.875)
    assert content["scores"]["2-0"] == round(sum(right) / 7, 6)
    assert content["facts"] == json.loads(header)["header"]
    assert content["facts"]["fingerprint"]["weights"]
    runs.unlink()
    err = refused(program.main, f"{SHORT} --out {path}")
    assert f"--out {path} exists, and its runs" in err
    assert read_json(path) == content
    for place in "run_batch", "models.load_model":
        monkeypatch.setattr(f"cli.detect.{place}", Mock(side_effect=KeyboardInterrupt))
        status, _, err = call(program.main, f"{SHORT} --out {tmp_path}/other.json")
        assert status == 130 and "the same command continues" in err


def test_the_bundled_file_s_texts_are_the_miniature_s_and_the_first_twenty_answers_are_counted(
    done, tmp_path, monkeypatch
):
    monkeypatch.setattr(detect, "LONG", 0)
    _, err = done(program.main, f"{LONG} --runs 24 --out {tmp_path}/h.json")
    assert err.count("about 0.0 hours are left; --runs N makes fewer runs\n") == 1
    assert re.findall(r"so far, (?:1\d|20) of (\d+) answers are right\n", err) == ["20"]
    facts = read_json(tmp_path / "h.json")["facts"]
    shipped = read_json(FOLDER / "scores" / "miniature.json")["facts"]
    different = {name for name in facts | shipped if facts.get(name) != shipped.get(name)}
    assert {"runs"} <= different <= {"runs", "device", "dtype", "versions"}


def test_needles_are_counted_without_heads_run_by_run_and_an_interrupted_count_continues(
    done, tmp_path
):
    lines = {}
    for sizes in ("1,3", "3"):
        path = tmp_path / "new folder" / f"{sizes}.jsonl"
        out, _ = done(program.main, f"{SHORT} --masked {sizes} --out '{path}'")
        header, *lines[sizes] = read_lines(path)
        assert out.splitlines()[:-2] == ablation.ablation_table(lines[sizes])
        assert out.endswith(f"\n\n8 of 8 answers are right; wrote {path}\n")
    assert header["header"]["masked"]["3 copy"] == ["3-1", "2-1", "2-0"]
    right = {name: sum(run["masked"][name] for run in lines["1,3"]) for name in run_names("1,3")}
    assert right["3 copy"] < 2 and all(right[f"3 random {seed}"] > 4 for seed in range(3))
    for both, alone in zip(lines["1,3"], lines["3"], strict=True):
        # No set of heads changes the cache that the next one reads.
        assert [*alone["masked"]] == run_names("3")
        assert alone.pop("masked").items() < both.pop("masked").items()
        assert alone == both
    complete = path.read_bytes()
    changed = complete.replace(b'"3 copy": false', b'"3 copy": true', 1)
    path.write_bytes(b"".join(changed.splitlines(keepends=True)[:4])[:-9])  # two runs
    again, _ = done(program.main, f"{SHORT} --masked 3 --out '{path}'")
    assert path.read_bytes() == changed and again != out


def run_names(sizes):
    kinds = ["copy", "write", "mass", *(f"random {seed}" for seed in range(3))]
    return [f"{n} {kind}" for n in sizes.split(",") for kind in kinds]


def test_only_the_measures_of_the_head_file_are_counted(done, tmp_path):
    copy = read_json(FOLDER / "scores" / "miniature.json")["scores"]
    heads = write_json(tmp_path / "copy.json", dict(reversed(copy.items())))
    path = tmp_path / "counts.jsonl"
    done(program.main, f"{SHORT} --masked 2 --heads {heads} --runs 1 --out {path}")
    masked = read_lines(path)[0]["header"]["masked"]
    assert ", ".join(masked) == "2 copy, 2 random 0, 2 random 1, 2 random 2"


def test_detection_stops_if_none_of_the_first_twenty_answers_is_right(
    refused, tmp_path, monkeypatch
):
    monkeypatch.setattr(detect, "SUCCESS", 1)
    path = tmp_path / "h.json"
    for _ in range(2):  # also if it is continued
        last = refused(program.main, f"{LONG} --runs 28 --out {path}").splitlines()[-1]
        assert "error: 0 of 20 answers are right; the first one is '" in last
        assert last.endswith("; --min-success 0 goes on")
        assert len(Path(f"{path}.runs.jsonl").read_text().splitlines()) == 21
    err = refused(program.main, f"{LONG} --runs 28 --out {path} --min-success 0")
    assert "0 of 28 answers are right" in err


REFUSED = """
--lengths 1000:3000:2 | 3000 tokens do not fit the context of
--lengths 0:600:2 | the prompt of 0 tokens with the needle
--max-new-tokens 100000000 | --max-new-tokens 100000000 leaves no room for a prompt
--lengths 5:4:2 | argument --lengths: invalid lengths value
--template '{context} and that is all' | {context}, once, and {question}
--haystack /proc/self/fdinfo | holds no text
--needles /dev/null | /dev/null holds no needles
--lengths 500 --depths 2 --runs 99 | places make
--masked 1 --min-success 3 | not allowed with argument --masked
--published --raw | --raw has no effect
--published --seed 1 | --seed has no effect
--raw --template-args '{"a": 1}' | --template-args has no effect
--heads miniature | --heads has no effect without --masked
--masked 1 | no head scores are known for model: give --heads FILE, or measure th
--masked 1 --heads miniature | 32 heads instead of 3 layers of 4
--masked 7 --heads HEADS | 7 random heads are too many
--out . | --out . is a folder; give a file in it
--out HEADS | exists, and its runs (HEADS.runs.jsonl) do not; choose another
--masked 1 --heads HEADS --out HEADS | line 1 is not the header
--out CUT | cut.json is not valid JSON
--masked 1 --out README.md | README.md: line 1 is not the header of runs
"""


@each("more, message", REFUSED)
def test_bad_options_are_refused_before_weights_are_read(
    refused, chat_model, tmp_path, more, message
):
    model = shutil.copytree(chat_model, tmp_path / "model")
    (model / "model.safetensors").write_text("damaged")
    heads = model / "heads.json"
    cut = model / "cut.json"  # its runs are complete
    cut.write_text("{")
    (model / "cut.json.runs.jsonl").touch()
    more = shlex.split(more.replace("HEADS", str(heads)).replace("CUT", str(cut)))
    err = refused(program.main, f"--model {model} --out {tmp_path}/h.json", *more)
    assert message.replace("HEADS", str(heads)) in err.splitlines()[-1]
    assert [*tmp_path.iterdir()] == [model]
    assert heads.read_bytes() == (chat_model / "heads.json").read_bytes()


def test_a_head_file_is_not_overwritten_by_counts(call, refused, tmp_path):
    path = tmp_path / "heads.json"
    call(program.main, f"{SHORT} --out {path} --min-success 1")
    kept = path.read_bytes()
    for out in path, f"{path}.runs.jsonl":
        err = refused(program.main, f"{SHORT} --masked 1 --out {out}")
        assert err.endswith("choose another --out, or delete it\n")
    assert path.read_bytes() == kept


# What five sets of heads find of ten needles, of which all heads find the first nine.
FOUND = {
    "1 copy": "0000000000",
    "1 mass": "0000000011",
    "1 random 0": "1111111100",
    "1 random 1": "1111111110",
    "1 random 2": "1100000011",
}
EXPECTED = """\
| masked heads | found, of 10 | lost : won          | p                      | p, random |
| ------------ | ------------ | ------------------- | ---------------------- | --------- |
| none         | 9            |                     |                        |           |
| 1 copy       | 0            | 9 : 0               | **0.0039**             | 0.1250    |
| 1 mass       | 2            | 8 : 1               | 0.0391                 | 0.5000    |
| 1 random     | 8, 9, 4      | 1 : 0, 0 : 0, 6 : 1 | 1.0000, 1.0000, 0.1250 |           |"""


def test_the_table_has_exact_p_values_against_all_heads_and_the_most_similar_random_ones():
    records = [
        {"right": i < 9, "masked": {name: found[i] == "1" for name, found in FOUND.items()}}
        for i in range(10)
    ]
    assert "\n".join(ablation.ablation_table(records)) == EXPECTED


NO_COPIES = [{"right": True, "scores": {}, "write": {}, "mass": {}, "answer": ""}] * 3
PLACES = [{"needle": i, "span": [i, 9]} for i in range(2)]
ZERO = (
    '{"needle": 0, "span": [0, 9], "answer": "", "right": true, "write": {}, "mass": {}, "scores": '
)
SEED = '{"header": {"seed": 0}}\n'
FIRST = ZERO + '{"0-0": 1.0}}\n'
ODD = FIRST.replace("scores", "copies")
SECOND = FIRST.replace(": 0", ": 1").replace("[0", "[1")


def continued(path):
    return detect.stored_runs(path, {"seed": 0}, [([], place) for place in PLACES])


OTHER_RUNS = """
needles.read_needles | {"needle": "", "question": "?", "real_needle": "x"} | line 1: needs
continued | {"header": {}} | holds runs with another seed
continued | {"header": [1]} | line 1 is not the header
continued | SEED + FIRST + FIRST | line 3 is not run 2 of 2
continued | SEED + FIRST + SECOND + SECOND | line 4 is not run 3 of 2
continued | SEED + ODD | line 2 is not run 1 of 2
"""


@each("reader, text, message", OTHER_RUNS)
def test_a_file_that_holds_no_needles_or_other_runs_is_refused(tmp_path, reader, text, message):
    path = tmp_path / "lines.jsonl"
    path.write_text(text if text.startswith("{") else eval(text))
    with pytest.raises(ValueError, match=message):
        eval(reader)(path)


def test_runs_without_a_needle_or_a_copy_give_no_scores(llama):
    with pytest.raises(ValueError, match="not a range of"):
        detect.score_run(llama, [1, 2, 3], (2, 2))
    with pytest.raises(ValueError, match="0 heads copied"):
        detect.mean_scores(llama, NO_COPIES, {}, 1)
