"""BERTScore and FactKB with tiny models in place of the real ones; metrics that lack a library or a model."""

import json
import math

import huggingface_hub
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from tasks import TASKS, metrics, model_metrics
from tasks.model_metrics import FACTKB, ROBERTA

TINY = dict(hidden_size=16, num_attention_heads=1, intermediate_size=32)
SUMMARY, ARTICLE = "The harbour was closed after the storm.", "A storm closed the other harbour; ferries sailed on."
LONG = "Another boat lay in the harbour. " * 100                # more than 512 tokens


def vocabulary(first, last):
    """Byte-level BPE without merges: token → id. Special tokens are first, the mask token last."""
    return {token: i for i, token in enumerate([*first, *sorted(pre_tokenizers.ByteLevel.alphabet()), last])}


def test_factkb_is_the_probability_of_class_1_on_summary_and_article(tmp_path, monkeypatch):
    vocab = vocabulary(("<s>", "<pad>", "</s>", "<unk>"), "<mask>")
    config = transformers.RobertaConfig(**TINY, num_hidden_layers=2, vocab_size=len(vocab), num_labels=2,
                                        max_position_embeddings=514, type_vocab_size=1, pad_token_id=1)
    torch.manual_seed(0)
    model = transformers.RobertaForSequenceClassification(config).eval()
    with torch.no_grad():
        for matrix in model.parameters():
            matrix.mul_(15 if matrix.dim() > 1 else 1)          # so that the classes depend on the text
    model.half().save_pretrained(tmp_path)
    tokenizer = transformers.RobertaTokenizer(vocab=vocab, merges=[])
    tokenizer.save_pretrained(tmp_path)
    for name in ("FACTKB", "ROBERTA"):
        monkeypatch.setattr(model_metrics, name, str(tmp_path))
    pairs = [(SUMMARY, ARTICLE), (ARTICLE, SUMMARY), (LONG, LONG), (SUMMARY, None)]
    values = [line["factkb"] for line in model_metrics.factkb([
        {"prediction": summary, "references": ["not read"], "document": article} for summary, article in pairs])]
    for pair, value in zip(pairs[:2], values, strict=False):
        with torch.no_grad():
            logits = model.float()(**tokenizer(*pair, return_tensors="pt")).logits[0]
        assert value == pytest.approx(100 * logits.softmax(-1)[1].item(), abs=1e-3)     # padding: other sums
    assert abs(values[0] - values[1]) > 1 and 0 < values[2] < 100 and values[3] is None


def test_bertscore_compares_the_states_of_layer_40_up_to_512_tokens(tmp_path, monkeypatch):
    """Layer 40 makes all tokens alike here and the layers above it give NaN, so that every F1 is 1 or 0."""
    pytest.importorskip("bert_score", reason="in requirements-dev.txt")
    vocab = vocabulary(("[PAD]", "[CLS]", "[SEP]", "[UNK]"), "[MASK]")
    config = transformers.DebertaConfig(**TINY, num_hidden_layers=42, vocab_size=len(vocab), num_labels=3,
                                        relative_attention=True, pos_att_type="c2p|p2c", position_biased_input=False,
                                        max_position_embeddings=512, type_vocab_size=0, pad_token_id=0)
    model = transformers.DebertaForSequenceClassification(config).eval()
    layers = model.deberta.encoder.layer
    with torch.no_grad():
        layers[39].output.LayerNorm.weight.zero_()
        layers[39].output.LayerNorm.bias.fill_(1)
        layers[40].output.LayerNorm.bias.fill_(math.nan)
    model.half().config.save_pretrained(tmp_path)               # older formats, as the real one has
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "vocab_type": "gpt2"}))
    monkeypatch.setattr(model_metrics, "DEBERTA", str(tmp_path))
    pairs = [(SUMMARY, ARTICLE), (LONG, ARTICLE), ("", ARTICLE), (SUMMARY, "")]
    values = model_metrics.bertscore([{"prediction": summary, "references": [reference, "not read"]}
                                      for summary, reference in pairs])
    assert [line["bertscore_f1"] for line in values] == pytest.approx([100, 100, 0, 0], abs=1e-3)


# Not installed, or not in the cache


@pytest.fixture
def cache(monkeypatch):
    """cache({model: files}): these files are in the cache, and no others."""
    def fill(files):
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache",
                            lambda name, file: f"{name}/{file}" if file in files.get(name, ()) else None)
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
    assert metrics.problems(TASKS["ifeval"]) == ["IFEval needs lm_eval, nltk: pip install -e '.[evaluate]'"]
    [values] = metrics.compute(TASKS["xsum"], [{"prediction": SUMMARY, "references": [SUMMARY]}])
    assert values == {"rougeL": 100} and capsys.readouterr().err.splitlines() == [f"left out: {one}" for one in lacking]
    monkeypatch.setattr(model_metrics, "find_spec", lambda module: True)
    monkeypatch.setattr("nltk.data.path", ["nowhere"])
    assert metrics.problems(TASKS["ifeval"]) == [
        "IFEval needs NLTK's sentence splitter: python -m nltk.downloader punkt_tab"]
