"""BERTScore and FactKB with tiny random models in place of the real ones, against values computed another way."""

import json

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tasks import TASKS, metrics, model_metrics
from tasks.model_metrics import FACTKB, ROBERTA

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


def save(model, folder):
    """Saves the model in the older of the two formats and in half precision. The model itself keeps the rounded weights
    in single precision, in which the metrics compute too."""
    model.half().config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    model.float()


# FactKB


@pytest.fixture(scope="module")
def factkb(tmp_path_factory):
    """(classifier, metric) of a tiny classifier; the tokenizer is in a folder of its own."""
    vocab = vocabulary(*ROBERTA_SPECIAL)
    config = transformers.RobertaConfig(**TINY, num_hidden_layers=2, vocab_size=len(vocab), num_labels=2,
                                        max_position_embeddings=LIMIT + 2, type_vocab_size=1,
                                        pad_token_id=1, bos_token_id=0, eos_token_id=2)
    model = randomise(transformers.RobertaForSequenceClassification(config), seed=0, scale=0.5)
    folder, tokenizer = tmp_path_factory.mktemp("factkb"), tmp_path_factory.mktemp("roberta")
    save(model, folder)
    config.save_pretrained(tokenizer)
    transformers.RobertaTokenizer(vocab=vocab, merges=MERGES).save_pretrained(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_metrics, "FACTKB", str(folder))
        patch.setattr(model_metrics, "ROBERTA", str(tokenizer))
        yield model, model_metrics.factkb


def pair_ids(summary, article):
    """<s> summary </s></s> article </s>; the longer text loses a token at a time until all fit."""
    first, second = (text_ids(text, ROBERTA_SPECIAL) for text in (summary, article))
    while len(first) + len(second) + 4 > LIMIT:
        (first if len(first) > len(second) else second).pop()
    return [0, *first, 2, 2, *second, 2]


def test_factkb_is_the_probability_of_class_1_on_summary_and_article(factkb):
    model, metric = factkb
    pairs = [(SUMMARY, ARTICLE), (SUMMARY, LONG), (LONGER, LONG), (LONG, ARTICLE), ("", ARTICLE)]
    values = metric([{"prediction": summary, "references": ["not read"], "document": article}
                     for summary, article in pairs])
    for pair, value in zip(pairs, values, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([pair_ids(*pair)])).logits[0]           # [2], without padding
        # Padding changes the order of float32 summation.
        assert value == {"factkb": pytest.approx(100 * logits.softmax(-1)[1].item(), abs=1e-3)}


# BERTScore


@pytest.fixture(scope="module")
def bertscore(tmp_path_factory):
    """(encoder of 42 layers, metric) of a tiny classifier without tokenizer.json and maximum length."""
    pytest.importorskip("bert_score", reason="in requirements-dev.txt")
    vocab, folder = vocabulary(*DEBERTA_SPECIAL), tmp_path_factory.mktemp("deberta")
    config = transformers.DebertaConfig(**TINY, num_hidden_layers=42, vocab_size=len(vocab), num_labels=3,
                                        relative_attention=True, pos_att_type="c2p|p2c", position_biased_input=False,
                                        max_position_embeddings=LIMIT, type_vocab_size=0, pad_token_id=0)
    model = randomise(transformers.DebertaForSequenceClassification(config), seed=1, scale=0.1)
    save(model, folder)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in MERGES), ""]
    (folder / "merges.txt").write_text("\n".join(merges), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "vocab_type": "gpt2"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_metrics, "DEBERTA", str(folder))
        yield model.deberta, model_metrics.bertscore


def embeddings(model, text):
    """Unit vectors of [CLS] text [SEP], [T, D], one text at a time, without padding."""
    ids = [1, *text_ids(text.strip(), DEBERTA_SPECIAL)[:LIMIT - 2], 2]
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.nn.functional.normalize(states[40][0], dim=-1)


def test_bertscore_matches_each_token_to_its_nearest_in_layer_40(bertscore):
    model, metric = bertscore
    texts = [(SUMMARY, ARTICLE), (LONG, ARTICLE), (SUMMARY, LONG), (f"\n {SUMMARY} \n", ARTICLE)]
    empty = [("", ARTICLE), (" \n", ARTICLE), (SUMMARY, ""), ("", "")]
    values = metric([{"prediction": summary, "references": [reference, "not read"]}
                     for summary, reference in texts + empty])
    for (summary, reference), value in zip(texts, values[:4], strict=True):
        cosine = embeddings(model, summary) @ embeddings(model, reference).T
        # [CLS] and [SEP] can be matched, but their own matches do not count.
        precision = cosine.max(1).values[1:-1].mean().item()
        recall = cosine.max(0).values[1:-1].mean().item()
        f1 = 2 * precision * recall / (precision + recall)
        # Padding changes the order of float32 summation, through 40 layers.
        assert value == {"bertscore_f1": pytest.approx(100 * f1, abs=5e-3)}
    assert values[4:] == [{"bertscore_f1": 0}] * 4


# Not installed, or not in the cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """cache({model: files}): an empty cache with these files."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def fill(files):
        for name, names in files.items():
            folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
            (folder / "refs").mkdir(parents=True)
            (folder / "refs" / "main").write_text("0" * 40)
            (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
            for file in names:
                (folder / "snapshots" / ("0" * 40) / file).touch()
    return fill


@pytest.mark.parametrize("files, missing", [
    ({FACTKB: ["config.json"], ROBERTA: ["config.json", "tokenizer.json"]}, FACTKB),    # an interrupted download
    ({FACTKB: ["config.json", "model.safetensors"], ROBERTA: ["config.json"]}, ROBERTA),
    ({FACTKB: ["config.json", "pytorch_model.bin"], ROBERTA: ["config.json", "vocab.json"]}, None),
])
def test_factkb_names_the_missing_model_and_the_command(files, missing, cache):
    cache(files)
    message = missing and f"factkb needs the model {missing} in the cache: hf download {missing}"
    assert model_metrics.factkb.problem() == message


def test_metrics_that_lack_something_say_what_and_are_left_out(cache, capsys, monkeypatch):
    cache({})
    monkeypatch.setattr(model_metrics, "find_spec", lambda module: module not in ("bert_score", "lm_eval", "nltk"))
    lacking = ["bertscore_f1 needs bert_score: pip install -e '.[evaluate]'",
               f"factkb needs the model {FACTKB} in the cache: hf download {FACTKB}"]
    assert metrics.problems(TASKS["xsum"]) == lacking and metrics.problems(TASKS["nq-swap"]) == []
    assert metrics.problems(TASKS["ifeval"]) == [
        "IFEval needs lm_eval, nltk: pip install -e '.[evaluate]'"]
    [values] = metrics.compute(TASKS["xsum"], [{"prediction": SUMMARY, "references": [SUMMARY]}])
    assert values == {"rougeL": 100} and capsys.readouterr().err.splitlines() == [f"left out: {one}" for one in lacking]
    monkeypatch.setattr(model_metrics, "find_spec", lambda module: True)
    monkeypatch.setattr("nltk.data.path", ["nowhere"])
    assert metrics.problems(TASKS["ifeval"]) == [
        "IFEval needs NLTK's sentence splitter: python -m nltk.downloader punkt_tab"]
