"""Metrics that need a library or a model: ROUGE, BERTScore and FactKB (× 100) for XSum, checkers
for IFEval.

Each has a function `problem`, which says what to install or download, or returns None."""

import re
from importlib.util import find_spec

from paper.tasks.items import instructions, texts
from paper.tasks.metrics import per_line
from runtime.errors import InputError
from runtime.fields import field

DEBERTA, FACTKB, ROBERTA = "microsoft/deberta-xlarge-mnli", "bunsenfeng/FactKB", "roberta-base"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def needs(name, *modules, models=()):
    """Decorate a metric with its `problem`.

    models: (hub id, files of which one must be in the cache)."""

    def problem():
        if missing := [module for module in modules if not find_spec(module)]:
            return f"{name} needs {', '.join(missing)}: pip install -e '.[evaluate]'"
        for model, files in models:  # several gigabytes, so not downloaded silently
            from huggingface_hub import try_to_load_from_cache

            if not any(isinstance(try_to_load_from_cache(model, file), str) for file in files):
                return f"{name} needs the model {model} in the cache: hf download {model}"
        if "nltk" in modules:
            import nltk

            try:
                nltk.data.find("tokenizers/punkt_tab")
            except LookupError:
                return (
                    f"{name} needs NLTK's sentence splitter: python -m nltk.downloader punkt_tab, "
                    "or that in the PyPI package llama-index-core (docs/data.md)"
                )
        return None

    def decorate(metric):
        metric.problem = problem
        return metric

    return decorate


@needs("rougeL", "rouge_score")
@per_line
def rouge(line):
    """rougeLsum without stemmer, sentences split at " . ", F1 × 100."""
    from rouge_score.rouge_scorer import RougeScorer

    pair = texts(line, "references")[0], field(line, "prediction")
    sentences = [text.replace(" . ", ".\n") for text in pair]
    return {"rougeL": 100 * RougeScorer(["rougeLsum"]).score(*sentences)["rougeLsum"].fmeasure}


@needs("bertscore_f1", "bert_score", models=[(DEBERTA, WEIGHTS)])
def bertscore(lines):
    """deberta-xlarge-mnli, layer 40, no idf, no rescaling, F1 × 100."""
    from bert_score import BERTScorer

    scorer = BERTScorer(DEBERTA, num_layers=40, idf=False, rescale_with_baseline=False)
    # transformers 5 loads the stored precision, sets no maximum length for this tokenizer, so that
    # truncation overflows, and lacks the method that bert-score calls for an empty text.
    scorer._model.float()
    tokenizer = scorer._tokenizer
    tokenizer.model_max_length = 512
    tokenizer.build_inputs_with_special_tokens = lambda ids: [
        tokenizer.cls_token_id,
        *ids,
        tokenizer.sep_token_id,
    ]
    predictions = [field(line, "prediction") for line in lines]
    f1 = scorer.score(predictions, [texts(line, "references")[0] for line in lines])[2]
    return [{"bertscore_f1": 100 * value} for value in f1.tolist()]


@needs(
    "factkb",
    "transformers",
    models=[(FACTKB, WEIGHTS), (ROBERTA, ("tokenizer.json", "vocab.json"))],
)
def factkb(lines):
    """Probability × 100 of class 1 of bunsenfeng/FactKB on summary and article; None without an
    article."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROBERTA)
    model = AutoModelForSequenceClassification.from_pretrained(FACTKB, num_labels=2).float()

    @torch.inference_mode()
    def score(line):
        if not line.get("document"):
            return None
        pair = tokenizer(
            field(line, "prediction"),
            line["document"],
            padding="max_length",
            truncation=True,
            max_length=512,
            return_tensors="pt",
        )
        return 100 * model(**pair).logits.softmax(-1)[0, 1].item()

    return [{"factkb": score(line)} for line in lines]


@needs("IFEval", "lm_eval", "langdetect", "immutabledict", "nltk")
@per_line
def ifeval(line):
    """Strict, on the raw response. At prompt level a line counts if all its instructions are
    followed; at instruction level `summary` weights it by their number. Published: only the first
    element of a list argument is checked."""
    complete = list(instructions(line))
    shortened = []
    for name, arguments in complete:
        first = {k: v[:1] if isinstance(v, list) else v for k, v in arguments.items()}
        shortened.append((name, first))
    values = {}
    for suffix, pairs in (("", complete), ("_published", shortened)):
        followed = [follows(*pair, line) for pair in pairs]
        values |= {
            f"prompt_strict{suffix}": float(all(followed)),
            f"instruction_strict{suffix}": sum(followed) / len(followed),
        }
    return values | {"instructions": len(complete)}


def follows(name, kwargs, line):
    """Whether the line's prediction follows one instruction. An empty prediction follows none."""
    import langdetect
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    langdetect.DetectorFactory.seed = 0  # it draws random numbers
    if name not in INSTRUCTION_DICT:
        raise InputError(f"unknown instruction {name!r} in field 'instruction_id_list'")
    response = field(line, "prediction")
    if not response.strip():
        return False
    if name == "keywords:letter_frequency" and not re.fullmatch(
        "[a-z]", kwargs.get("letter", "a").lower()
    ):
        # Counts the sign itself; the harness replaces a sign outside a-z by a random letter.
        enough = response.count(kwargs["letter"]) >= kwargs["let_frequency"]
        return enough != (kwargs["let_relation"] == "less than")
    checker = INSTRUCTION_DICT[name](name)
    checker.build_description(**kwargs)
    if "prompt" in (checker.get_instruction_args() or {}):
        checker.build_description(prompt=field(line, "prompt"))
    return bool(checker.check_following(response))
