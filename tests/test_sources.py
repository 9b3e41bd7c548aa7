"""Sources: the positions that heads point at, compared with the attention weights of transformers."""

import pytest
import torch
import transformers

from decore import generate
from heads.sources import find_sources
from model import Transformer
from tests.checkpoints import CLASSES, FAMILIES, random_ids, write_checkpoint

HEADS = [(0, 1), (1, 0), (2, 2), (2, 3)]


@pytest.mark.parametrize("family", ["llama3", "mistral-window"])
def test_sources_are_where_transformers_puts_the_largest_weight(tmp_path, family):
    model = Transformer.load(write_checkpoint(tmp_path, family))
    reference = getattr(transformers, CLASSES[FAMILIES[family]["model_type"]])
    reference = reference.from_pretrained(tmp_path, attn_implementation="eager")
    for prompt in (random_ids(21, seed=1), random_ids(1, seed=2)):
        ids = generate(model, prompt, heads=HEADS, max_new_tokens=19, eos_ids=()).ids
        with torch.inference_mode():
            weights = reference(torch.tensor([prompt + ids[:-1]]), output_attentions=True).attentions
        for t, places in enumerate(find_sources(model, prompt, ids, HEADS)):
            at = len(prompt) - 1 + t
            expected = [int(weights[layer][0, head, at, :len(prompt)].argmax()) for layer, head in HEADS]
            assert dict(places) == {place: expected.count(place) / len(HEADS) for place in expected}
            assert [share for _, share in places] == sorted((share for _, share in places), reverse=True)
