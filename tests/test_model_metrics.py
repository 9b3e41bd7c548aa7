"""BERTScore and FactKB with tiny random models in place of the real ones, against values computed another way.

huggingface_hub reads its environment when it is imported, so the metrics run in another process, whose cache holds the
tiny models."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tasks import TASKS, metrics, model_metrics
from tasks.metrics import Unavailable

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FACTKB, ROBERTA, DEBERTA = "bunsenfeng/FactKB", "roberta-base", "microsoft/deberta-xlarge-mnli"
LIMIT = 512                                             # tokens, the special ones included
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "r"), ("o", "n"), ("Ġ", "a"), ("Ġ", "s")]
# Special tokens stand first, the mask token last.
ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>"), "<mask>"
DEBERTA_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]"), "[MASK]"
TINY = dict(hidden_size=16, num_attention_heads=1, intermediate_size=32)

SUMMARY = "The harbour was closed after the storm."
ARTICLE = "A storm closed the other harbour on Thursday; ferries sailed on."
LONG = " ".join(f"{n} boats lay in the harbour, and then another storm came." for n in range(20))
LONGER = " ".join(f"On day {n} the ferry sailed to the north." for n in range(40))

SCRIPT = """
import json, sys
from tasks import model_metrics
json.dump([getattr(model_metrics, name)(rows) for name, rows in json.load(sys.stdin)], sys.stdout)
"""


def vocabulary(first, last):
    """Byte-level BPE: token → id."""
    tokens = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES), last]
    return {token: i for i, token in enumerate(tokens)}


def text_ids(text, special):
    """The ids of a text without any special token."""
    tokenizer = Tokenizer(models.BPE(vocabulary(*special), MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer.encode(text).ids


def randomise(model, seed, scale):
    """Weights from numpy's frozen stream. scale: of the matrices; too small, and tokens do not influence one another;
    too large, and many layers make all tokens alike."""
    random = np.random.RandomState(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            deviation = 0.02 if weight.dim() == 1 else 1 if "embeddings" in name else scale
            noise = torch.from_numpy(deviation * random.standard_normal(weight.shape))
            weight.copy_(name.endswith("LayerNorm.weight") + noise)
    return model.eval()


def snapshot(home, name):
    """Makes the folder of a model in the cache."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    return folder / "snapshots" / COMMIT


def save(model, folder):
    """Saves the model in the older of the two formats and in half precision. The model itself keeps the rounded weights
    in single precision, in which the metrics compute too."""
    model.half().config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    model.float()


def save_factkb(home):
    """Writes the classifier, and roberta-base with only its tokenizer → the classifier."""
    vocab = vocabulary(*ROBERTA_SPECIAL)
    config = transformers.RobertaConfig(**TINY, num_hidden_layers=2, vocab_size=len(vocab), num_labels=2,
                                        max_position_embeddings=LIMIT + 2, type_vocab_size=1,
                                        pad_token_id=1, bos_token_id=0, eos_token_id=2)
    model = randomise(transformers.RobertaForSequenceClassification(config), seed=0, scale=0.5)
    save(model, snapshot(home, FACTKB))
    folder = snapshot(home, ROBERTA)
    config.save_pretrained(folder)
    transformers.RobertaTokenizer(vocab=vocab, merges=MERGES).save_pretrained(folder)
    return model


def save_deberta(home):
    """Writes a classifier of 42 layers, without tokenizer.json and maximum length → its encoder."""
    vocab = vocabulary(*DEBERTA_SPECIAL)
    config = transformers.DebertaConfig(**TINY, num_hidden_layers=42, vocab_size=len(vocab), num_labels=3,
                                        relative_attention=True, pos_att_type="c2p|p2c", position_biased_input=False,
                                        max_position_embeddings=LIMIT, type_vocab_size=0, pad_token_id=0)
    model = randomise(transformers.DebertaForSequenceClassification(config), seed=1, scale=0.1)
    folder = snapshot(home, DEBERTA)
    save(model, folder)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in MERGES), ""]
    (folder / "merges.txt").write_text("\n".join(merges), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "vocab_type": "gpt2"}))
    return model.deberta


PAIRS = {"both short": (SUMMARY, ARTICLE), "long article": (SUMMARY, LONG), "both long": (LONGER, LONG),
         "long summary": (LONG, ARTICLE), "no summary": ("", ARTICLE)}
TEXTS = {"short": (SUMMARY, ARTICLE), "long summary": (LONG, ARTICLE), "long reference": (SUMMARY, LONG),
         "white space around": (f"\n {SUMMARY} \n", ARTICLE)}
EMPTY = {"no summary": ("", ARTICLE), "blank summary": (" \n", ARTICLE), "no reference": (SUMMARY, ""),
         "nothing": ("", "")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Metric → (its model, case → its values). One process computes both, because the imports take longest."""
    home = tmp_path_factory.mktemp("cache")
    models = {"factkb": (save_factkb(home), PAIRS), "bertscore": (save_deberta(home), TEXTS | EMPTY)}
    if not importlib.util.find_spec("bert_score"):
        del models["bertscore"]
    rows = [(name, [{"prediction": one, "references": [two, "not read"], "document": two}
                    for one, two in cases.values()]) for name, (_, cases) in models.items()]
    clean = {k: v for k, v in os.environ.items() if not k.upper().startswith(("HF_", "TRANSFORMERS_"))}
    clean |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", SCRIPT], input=json.dumps(rows), env=clean, cwd=home,
                            capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-1000:]
    return {name: (model, dict(zip(cases, values, strict=True)))
            for (name, (model, cases)), values in zip(models.items(), json.loads(result.stdout), strict=True)}


# FactKB

def pair_ids(summary, article):
    """<s> summary </s></s> article </s>; the longer text loses a token at a time until all fit."""
    first, second = (text_ids(text, ROBERTA_SPECIAL) for text in (summary, article))
    while len(first) + len(second) + 4 > LIMIT:
        (first if len(first) > len(second) else second).pop()
    return [0, *first, 2, 2, *second, 2]


@pytest.mark.parametrize("pair", PAIRS)
def test_factkb_is_the_probability_of_class_1_on_summary_and_article(pair, runs):
    model, values = runs["factkb"]
    with torch.no_grad():
        logits = model(torch.tensor([pair_ids(*PAIRS[pair])])).logits[0]        # [2], without padding
    # Padding changes the order of float32 summation.
    assert values[pair] == {"factkb": pytest.approx(100 * logits.softmax(-1)[1].item(), abs=1e-3)}


# BERTScore

def embeddings(model, text):
    """Unit vectors of [CLS] text [SEP], [T, D], one text at a time, without padding."""
    ids = [1, *text_ids(text.strip(), DEBERTA_SPECIAL)[:LIMIT - 2], 2]
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.nn.functional.normalize(states[40][0], dim=-1)


@pytest.fixture(scope="module")
def bertscore(runs):
    pytest.importorskip("bert_score", reason="in requirements-dev.txt")
    return runs["bertscore"]


@pytest.mark.parametrize("texts", TEXTS)
def test_bertscore_matches_each_token_to_its_nearest_in_layer_40(texts, bertscore):
    model, values = bertscore
    one, other = (embeddings(model, text) for text in TEXTS[texts])
    cosine = one @ other.T
    # [CLS] and [SEP] can be matched, but their own matches do not count.
    precision = cosine.max(1).values[1:-1].mean().item()
    recall = cosine.max(0).values[1:-1].mean().item()
    f1 = 2 * precision * recall / (precision + recall)
    # Padding changes the order of float32 summation, through 40 layers.
    assert values[texts] == {"bertscore_f1": pytest.approx(100 * f1, abs=5e-3)}


@pytest.mark.parametrize("texts", EMPTY)
def test_bertscore_of_an_empty_text_is_0(texts, bertscore):
    assert bertscore[1][texts] == {"bertscore_f1": 0}


# Not installed, or not in the cache

@pytest.fixture
def cache(tmp_path, monkeypatch):
    """cache({model: files}): an empty cache with these files."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def fill(files):
        for name, names in files.items():
            folder = snapshot(tmp_path, name)
            for file in names:
                (folder / file).touch()
    return fill


@pytest.mark.parametrize("files, missing", [
    ({}, FACTKB),
    ({FACTKB: ["config.json"], ROBERTA: ["config.json", "tokenizer.json"]}, FACTKB),    # an interrupted download
    ({FACTKB: ["config.json", "model.safetensors"]}, ROBERTA),
    ({FACTKB: ["config.json", "pytorch_model.bin"], ROBERTA: ["config.json"]}, ROBERTA),
    ({FACTKB: ["config.json", "pytorch_model.bin"], ROBERTA: ["config.json", "vocab.json"]}, None),
])
def test_factkb_names_the_missing_model_and_the_command(files, missing, cache):
    cache(files)
    message = missing and f"factkb needs the model {missing} in the cache: hf download {missing}"
    assert model_metrics.factkb.problem() == message
    if missing:
        with pytest.raises(Unavailable, match=re.escape(message)):
            model_metrics.factkb([{"prediction": SUMMARY, "document": ARTICLE}])


def test_a_run_names_what_its_metrics_lack_before_anything_is_decoded(cache, capsys, monkeypatch):
    cache({})
    monkeypatch.setattr(model_metrics, "find_spec", lambda module: module not in ("bert_score", "lm_eval"))
    for name in ("xsum", "ifeval", "nq-swap"):
        metrics.check_available(TASKS[name])
    assert capsys.readouterr().err.splitlines() == [
        "xsum: bertscore_f1 needs bert_score: pip install -e '.[evaluate]'",
        f"xsum: factkb needs the model {FACTKB} in the cache: hf download {FACTKB}",
        "ifeval: IFEval needs lm_eval, langdetect, immutabledict, nltk: pip install -e '.[evaluate]'"]
    monkeypatch.setattr(model_metrics, "find_spec", lambda module: True)
    monkeypatch.setattr(model_metrics, "has_punkt", lambda: False)
    metrics.check_available(TASKS["ifeval"])
    assert "sentence splitter: python -m nltk.downloader punkt_tab" in capsys.readouterr().err


def test_one_extra_installs_what_the_papers_tasks_need():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {re.match(r"[\w-]+(\[\w+\])?", line)[0] for line in extras["evaluate"]}
    assert names >= {"pyarrow", "rouge-score", "bert-score", "transformers", "lm-eval[ifeval]", "sentencepiece",
                     "protobuf"}
