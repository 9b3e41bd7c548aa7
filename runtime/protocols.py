"""What a model must offer. B prompts   R rows   T tokens   V vocabulary   D width"""

from typing import Protocol


class Model(Protocol):
    """`model.Transformer` and `hf.HFModel`, which say what the arguments are."""

    name: str
    config: object  # n_layers, n_heads, vocab_size, max_positions, tied_embeddings, d_model
    checkpoint: object  # runtime.checkpoint.Checkpoint; None: the weights are not from a file
    bos_id: int | None
    eos_ids: tuple  # that end a text
    pad_ids: tuple
    shard: object  # runtime.parallel.Shard: its rank among those that share the model
    product: str | None  # of a CPU's linear layers: a name of runtime/pack.py
    can_record: bool  # its steps as CUDA graphs
    reads_one_text: bool  # all rows of a pass read the same tokens
    has_exits: bool  # `read_layers` works
    can_take_back: bool  # its caches can forget their last tokens
    device: object
    dtype: object
    while_reading: object  # (cache, tokens of each pass) → a context, in which prompts are read

    # A cache has lengths, slots, P, select, take_back, copy_prompts and values: see `model.Cache`.
    def new_cache(self, lengths, capacity, rows=1): ...
    def prefill(self, ids, cache, head_mask=None, mask_on="output"): ...
    def forward(self, ids, cache=None, head_mask=None, mask_on="output"): ...
    def read_attention(self, ids, cache, head_mask=None): ...  # logits, attention of each layer
    def read_layers(self, ids, layers, cache=None): ...  # hidden states [R, B, T, D]
    def logits(self, x): ...  # of hidden states → [R, B, T, V]
    def unembedding(self, ids): ...
    def output_projections(self): ...
