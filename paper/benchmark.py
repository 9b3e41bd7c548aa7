"""A benchmark: the items of a task, as prompts of a model. running.py answers them."""

import json
from typing import NamedTuple

from paper.known import choose_rows
from paper.tasks import Task, data, prompts
from runtime.errors import InputError
from runtime.files import json_bytes, json_hash

# Not stored: the data hold them.
PROMPT_FIELDS = ("context", "title", "text", "passages", "without_context")


class Benchmark(NamedTuple):
    task: Task
    n_data: int  # items in the data; `items` may be a part of them
    items: list
    data: list  # a record per file
    demos: list
    demo_record: dict | None
    sample_seed: int | None  # None if the items are no sample
    known: dict | None  # how items were chosen by a closed-book run; None: they were not
    # Of the model
    layout: str | None = None
    template_args: dict | None = None  # arguments of the chat template
    max_new_tokens: int | None = None  # None for multiple choice
    min_new_tokens: int | None = None  # None if an answer may be empty
    encoded: list = ()  # the token ids of each item, a prompts.Encoded
    questions: dict = {}  # index → the fields of a line that do not depend on the answer

    def header(self):
        """The fields of a header that say what determines the prompts."""
        task = self.task
        return {
            "task": task.name,
            "version": task.version,
            "layout": self.layout,
            "template": task.template if task.own else None,
            "system": task.instruction if task.own else None,
            "template_args": self.template_args,
            "known": self.known,
            "n": len(self.items),
            "sample_seed": self.sample_seed,
            "data": self.data,
            "demos": self.demo_record,
        }


def load_benchmark(task, how, model=None):
    """The benchmark of a task. how: the parsed command line.

    model: `cli.models.Facts`; None: without the layout and the token ids of the prompts."""
    items, files, demos, record = data.load_data(task, how.data, how.demos)
    choice = None
    if path := how.known or how.unknown:
        items, choice = choose_rows(task, items, path, bool(how.known), model)
    drawn = data.draw_items(items, how.sample or how.limit, how.sample_seed, how.skip or 0)
    if not drawn:
        raise InputError(f"--skip {how.skip} leaves none of {task.name}'s {len(items)} items")
    of_model = as_prompts(task, drawn, demos, how, model) if model else {}
    n = len(items)
    return Benchmark(task, n, drawn, files, demos, record, how.sample_seed, choice, **of_model)


def as_prompts(task, items, demos, how, model):
    """The fields of a `Benchmark` that are of the model."""
    native = "mistral" if model.config.model_type == "mistral" else "chat"
    native = native if model.tokenizer.chat_template else "plain"
    layout = task.layout or how.layout or native
    if layout == "chat" and not model.tokenizer.has_system_turn:
        layout = "user"
    template_args = None
    if layout != "plain":
        from cli import models  # slow, as are the facts of a model

        template_args = models.benchmark_template_args(model.tokenizer, how.template_args)
    prompt = demos, model.tokenizer, layout, template_args
    encoded = [prompts.item_to_ids(task, item, *prompt) for item in items]
    limit = how.max_new_tokens or task.max_new_tokens
    least = how.min_new_tokens
    if least and least > limit:
        raise InputError(f"--min-new-tokens {least} is above {task.name}'s {limit} new tokens")
    return dict(
        layout=layout,
        template_args=template_args,
        max_new_tokens=None if task.choice else limit,
        min_new_tokens=least,
        encoded=encoded,
        questions={e.index: question_of(items[e.index], e) for e in encoded},
    )


def in_batches(encoded, size):
    """Batches of items, the longest prompts first."""
    longest_first = sorted(encoded, key=lambda e: -len(e.prompt))
    return [longest_first[start : start + size] for start in range(0, len(encoded), size)]


def question_of(item, encoded):
    """The part of a line that does not depend on the answer."""
    fields = {name: value for name, value in item.items() if name not in PROMPT_FIELDS}
    key = json_hash([encoded.prompt, encoded.without_context])
    fields |= {"prompt_sha256": key, "prompt_tokens": len(encoded.prompt)}
    return json.loads(json_bytes(fields))
