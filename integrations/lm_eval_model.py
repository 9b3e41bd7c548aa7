"""A model and a decoding method as a model of lm-evaluation-harness.

Heads are masked as in `score` and `generate`: at every position if answers are scored, from the
last prompt token on if texts are generated."""

import warnings
from operator import itemgetter

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from tqdm import tqdm

from decoders import scoring
from decore import generate
from runtime.checks import amateur_of
from runtime.errors import InputError, one_line

GREEDY = {"do_sample": False, "temperature": 0, "num_beams": 1}
SAMPLING = ("top_p", "top_k", "min_p")  # have no effect on greedy decoding


class HarnessModel(TemplateLM):
    """method: as `generate` takes it. batch_size: prompts that are continued at once."""

    max_gen_toks = 256  # if a task does not say; the same as in the harness's `hf`
    tokenizer_name = ""  # names caches of requests, which the command refuses

    def __init__(
        self, model, tokenizer, method, batch_size=1, renormalise=True, template_args=None
    ):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.template_args = template_args
        self.method = method
        self.renormalise = renormalise
        models = model, amateur_of(method, model)
        self.max_length = min(m.config.max_positions for m in models)

    @property
    def prefix_token_id(self):
        """The first token of a text without a context: BOS, else the end token."""
        special = self.tokenizer.special
        return self.tokenizer.core.token_to_id(
            special.get("bos_token") or special.get("eos_token", "")
        )

    eot_token_id = prefix_token_id  # the base class requires it, and uses it for the prefix only

    def __repr__(self):  # in the table of results
        return self.model.name

    def tok_encode(self, string, add_special_tokens=None, **_):
        if add_special_tokens is None:  # BOS is not added to a text that spells it
            bos = self.tokenizer.special.get("bos_token")
            add_special_tokens = bos is None or not string.startswith(bos)
        return self.tokenizer.encode(string, bos=add_special_tokens)

    def _encode_pair(self, context, continuation):
        """The ids of both. A continuation that merges with its context is tokenised alone, as in
        evaluate.py."""
        ids, answer = super()._encode_pair(context, continuation)
        if ids + answer != self.tok_encode(context + continuation):
            spaces = context[len(context.rstrip()) :]
            answer = self.tok_encode(spaces + continuation, add_special_tokens=False)
        return ids or [self.prefix_token_id], answer

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        """[(texts, context ids, answer ids)] → [(log p, whether greedy decoding gives the answer)].

        A context is read once for all its answers; one that is too long loses its beginning."""
        groups = {}  # context → {number of the request: answer}
        out = {}
        for i, (texts, context, answer) in enumerate(requests):
            if not 0 < len(answer) <= self.max_length:
                question, text = (one_line(repr(part), 60) for part in texts)
                raise InputError(
                    f"the answer {text} to {question} has {len(answer)} tokens; "
                    f"{self.model.name} scores 1 to {self.max_length}"
                )
            # The last token of an answer is not read.
            context = self.shorten(context, self.max_length + 1 - len(answer))
            groups.setdefault(tuple(context), {})[i] = answer
        for context, answers in tqdm(groups.items(), desc="contexts", disable=disable_tqdm):
            [([sums], [greedy])] = scoring.loglikelihoods(
                self.model, [context], [[*answers.values()]], [self.method], self.renormalise
            )
            out |= zip(answers, zip(sums, greedy))
        return [out[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise InputError(
            "perplexity of complete texts is not computed: choose tasks with answers or "
            "generated texts"
        )

    def generate_until(self, requests, disable_tqdm=False):
        """Texts up to their first stop string, in batches; the longest prompts first."""
        prompts = []
        out = []
        for request in requests:
            text, options = request.args
            stop, limit = self.read_generation(options)
            ids = self.tok_encode(text) or [self.prefix_token_id]
            prompts.append((self.shorten(ids, self.max_length - limit), (stop, limit)))
        groups = Collator(prompts, lambda prompt: -len(prompt[0]), itemgetter(1), "gen_kwargs")
        batches = list(groups.get_batched(n=self.batch_size))
        for batch in tqdm(batches, desc="batches", disable=disable_tqdm):
            ids, [(stop, limit), *_] = zip(*batch)
            answers = generate(
                self.model,
                ids,
                self.method,
                max_new_tokens=limit,
                eos_ids=self.tokenizer.eos_ids,
                tokenizer=self.tokenizer,
                stop=stop,
            )
            out += [answer.text for answer in answers]
        return groups.get_original(out)

    def shorten(self, ids, room):
        """The last `room` ids of a context. Warns if there are more."""
        if len(ids) > room:
            warnings.warn(
                f"contexts that exceed {self.max_length} tokens with their answer lose their "
                "beginning, special tokens included",
                stacklevel=2,
            )
        return ids[-room:]

    def read_generation(self, options):
        """A task's `generation_kwargs` → (stop strings, maximum number of new tokens)."""
        options = normalize_gen_kwargs(options, self.max_gen_toks)
        stop = options.pop("until")
        limit = options.pop("max_gen_toks")
        for name, value in options.items():
            if name not in SAMPLING and GREEDY.get(name, ...) != value:
                raise InputError(
                    f"a task needs {name} {value!r}, but decoding is greedy: add --gen_kwargs "
                    "do_sample=False,temperature=0,num_beams=1"
                )
        if not 0 < limit < self.max_length:
            raise InputError(
                f"a task needs {limit} new tokens, but {self.model.name} reads {self.max_length} "
                "with the prompt: add --gen_kwargs max_gen_toks=N"
            )
        stop = tuple(text for text in stop if text)
        self.tokenizer.stream(stop)  # refuses what never matches, before the first batch
        return stop, limit

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        if not add_generation_prompt:
            raise InputError(
                "a task begins the answer itself (gen_prefix): leave out --apply_chat_template"
            )
        return self.tokenizer.render(chat_history, template_args=self.template_args)
