"""A model and a decoding method as a model of lm-evaluation-harness.

Heads are masked as in `score` and `generate`: at every position if answers are scored, from the last prompt token on if
texts are generated."""

import warnings
from operator import itemgetter

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import baselines
import cli
from runtime.files import short_hash

GREEDY = {"do_sample": False, "temperature": 0, "num_beams": 1}
SAMPLING = ("top_p", "top_k", "min_p")      # have no effect on greedy decoding


class HarnessModel(TemplateLM):
    """batch_size: prompts that are continued at once. settings: the arguments of baselines.generate and score."""

    max_gen_toks = 256                      # if a task does not say; the same as in the harness's `hf`

    def __init__(self, model, tokenizer, method="decore-entropy", batch_size=1, renormalise=True, template_args=None,
                 **settings):
        super().__init__()
        self.model, self.tokenizer, self.batch_size, self.template_args = model, tokenizer, batch_size, template_args
        self.settings, self.renormalise = dict(method=method, **settings), renormalise

    def get_model_info(self):
        """What the harness stores with its results."""
        info = self.settings | dict(renormalise=self.renormalise, model=self.model, dtype=str(self.model.dtype),
                                    template_args=self.template_args)
        [info["method"]] = cli.full_names([info["method"]], info.get("amateur"))
        return {name: [f"{layer}-{head}" for layer, head in value] if name in ("heads", "amateur_heads")
                else getattr(value, "name", value) for name, value in info.items()}

    @property
    def tokenizer_name(self):
        """Part of the name of files that store prompts, different for each chat template."""
        template = repr((self.tokenizer.chat_template, self.template_args))
        return f"{self.tokenizer.name}-{short_hash(template.encode())}".replace("/", "__")

    @property
    def max_length(self):
        amateur = self.settings.get("amateur") or self.model
        return min(model.config.max_positions for model in (self.model, amateur))

    @property
    def eot_token_id(self):
        eos = self.tokenizer.core.token_to_id(self.tokenizer.special.get("eos_token", ""))
        return eos if eos is not None else next(iter(self.tokenizer.eos_ids), None)

    @property
    def prefix_token_id(self):
        """The first token of a text without a context: BOS, else the end token."""
        token = self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        if token is None:
            raise ValueError(f"{self.tokenizer.name} has neither a BOS nor an end token to begin a text with")
        return token

    def tok_encode(self, string, add_special_tokens=None, **_):
        if add_special_tokens is None:      # BOS is not added to a text that spells it
            add_special_tokens = not string.startswith(self.tokenizer.core.id_to_token(self.prefix_token_id))
        return self.tokenizer.encode(string, bos=add_special_tokens)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        """[(texts, context ids, answer ids)] → [(log p, whether greedy decoding gives the answer)].

        A context is read once for all its answers. A context that is too long loses its beginning."""
        groups, out = {}, {}
        for i, (texts, context, answer) in enumerate(requests):
            if not 0 < len(answer) <= self.max_length:
                raise ValueError(f"an answer has {len(answer)} tokens; {self.model.name} scores 1 to {self.max_length}")
            room = self.max_length + 1 - len(answer)            # the last token of an answer is not read
            if len(context) > room:
                warnings.warn(f"contexts longer than {self.max_length} tokens lose their beginning", stacklevel=2)
            context = tuple(context[-room:] or [self.prefix_token_id])
            groups.setdefault(context, []).append((i, texts, answer))
        for context, group in tqdm(groups.items(), desc="contexts", disable=disable_tqdm):
            results = baselines.score(self.model, context, [answer for *_, answer in group], return_greedy=True,
                                      renormalise=self.renormalise, **self.settings)
            for (i, texts, _), result in zip(group, results, strict=True):
                out[i] = result
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, result)
        return [out[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Log-probability of complete texts, read in windows of `max_length` tokens."""
        windows, texts, out = [], [], [0.0] * len(requests)
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                texts.append(i)
        for i, (log_p, _) in zip(texts, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            out[i] += log_p
        return out

    def generate_until(self, requests, disable_tqdm=False):
        """Texts up to their first stop string, in batches; the longest prompts first."""
        prompts, out = [], []
        for request in requests:
            stop, limit = self.read_generation(request.args[1])
            ids = (self.tok_encode(request.args[0]) or [self.prefix_token_id])[limit - self.max_length:]
            prompts.append((ids, (stop, limit), request.args))
        groups = Collator(prompts, lambda prompt: -len(prompt[0]), itemgetter(1), "gen_kwargs")
        for batch in tqdm(list(groups.get_batched(n=self.batch_size)), desc="batches", disable=disable_tqdm):
            ids, [(stop, limit), *_], arguments = zip(*batch, strict=True)
            streams = [self.tokenizer.stream(stop) for _ in ids]

            def on_token(b, token, entropy, streams=streams):
                streams[b].push(token)
                return streams[b].ended

            baselines.generate(self.model, ids, max_new_tokens=limit, eos_ids=self.tokenizer.eos_ids, on_token=on_token,
                               **self.settings)
            for stream in streams:
                stream.end()
            texts = [stream.text for stream in streams]
            out += texts
            for args, text in zip(arguments, texts, strict=True):
                self.cache_hook.add_partial("generate_until", args, text)
        return groups.get_original(out)

    def read_generation(self, options):
        """A task's `generation_kwargs` → (stop strings, maximum number of new tokens)."""
        options = normalize_gen_kwargs(options, self.max_gen_toks)
        stop, limit = options.pop("until"), options.pop("max_gen_toks")
        for name, value in options.items():
            if name not in SAMPLING and (name not in GREEDY or value != GREEDY[name]):
                raise ValueError(f"a task needs {name} {value!r}, but decoding is greedy: add --gen_kwargs "
                                 "do_sample=False,temperature=0,num_beams=1")
        if not 0 < limit < self.max_length:
            raise ValueError(f"a task needs {limit} new tokens, but {self.model.name} reads {self.max_length} with the "
                             "prompt: add --gen_kwargs max_gen_toks=N")
        end = [] if self.eot_token_id is None else [self.tokenizer.core.id_to_token(self.eot_token_id)]
        return tuple(dict.fromkeys(text for text in [*stop, *end] if text)), limit

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        """The chat as text, without its system message if the template rejects that."""
        try:
            return self.render(chat_history, add_generation_prompt)
        except ValueError as error:
            rest = [message for message in chat_history if message["role"] != "system"]
            if rest == chat_history:
                raise
            warnings.warn(f"chats are rendered without their system message: {error}", stacklevel=2)
            return self.render(rest, add_generation_prompt)

    def render(self, messages, generation_prompt):
        """The chat as text. Without the generation prompt the last message is left open."""
        if generation_prompt:
            return self.tokenizer.render(messages, True, self.template_args)
        mark = "<the message ends here> "
        marked = [*messages[:-1], messages[-1] | dict(content=messages[-1]["content"] + mark)]
        text = self.tokenizer.render(marked, False, self.template_args)
        before, separator, after = text.rpartition(mark.rstrip())
        if not separator:
            raise ValueError(f"{self.tokenizer.name}: the chat template drops the last message")
        return before if after.startswith(" ") else before.rstrip()     # some templates strip messages
