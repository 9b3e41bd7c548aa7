"""Every task of lm-evaluation-harness with every decoder here: the adapter, and its command.

    python -m tasks.harness --model M --method decore-entropy --tasks triviaqa,truthfulqa_mc2

takes the options of decore.py and baselines.py; anything else goes to `lm_eval run`. Heads are masked where `score` and
`generate` mask them: in given answers at every position, in generation from the last prompt token on."""

import hashlib
import json
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def import_evaluate():
    """Import Hugging Face's `evaluate` for the harness and its tasks, which from the root would get our evaluate.py."""
    path = sys.path[:]
    sys.path[:] = [entry for entry in path if Path(entry or ".").resolve() != ROOT]
    try:
        import evaluate  # noqa: F401 (sys.modules keeps it)
    except ImportError:
        raise ImportError("lm-evaluation-harness is missing: pip install 'lm-eval>=0.4.10'") from None
    finally:
        sys.path[:] = path


if __name__ == "__main__":
    from cli import run
    from runtime import start
    start()
    if failed := run(import_evaluate):
        sys.exit(failed)

from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.models.utils import normalize_gen_kwargs  # noqa: E402
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402
from tqdm import tqdm  # noqa: E402

import baselines  # noqa: E402
import cli  # noqa: E402
from heads import choose_heads  # noqa: E402
from runtime.weights import fingerprint  # noqa: E402
from tokenizer import cut, stop_at  # noqa: E402

REFUSED = {"cad": "cad needs the context apart from the question, and the harness's tasks do not mark it",
           "ad": "ad scores an answer by all its positions at once, which is no log-probability"}
METHODS = tuple(method for method in baselines.METHODS if method not in REFUSED)
AT_ONCE = 2048                              # tokens of answers for which a context is read once
GREEDY = {"do_sample": False, "temperature": 0, "num_beams": 1}
SAMPLING = ("top_p", "top_k", "min_p")      # without effect where nothing is sampled


class Harness(TemplateLM):
    """A model and a decoding method as the harness sees them.

    batch_size: prompts that are continued at once. renormalise: as in `score`. template_args: more variables for the
    chat template. settings: the arguments of baselines.generate and score."""

    max_gen_toks = 256                      # where a task does not say; the same as in the harness's own backend

    def __init__(self, model, tokenizer, method="decore-entropy", batch_size=1, renormalise=True, template_args=None,
                 **settings):
        super().__init__()
        if method in REFUSED:
            raise ValueError(REFUSED[method])
        self.model, self.tokenizer, self.batch_size, self.template_args = model, tokenizer, batch_size, template_args
        self.how = dict(method=method, **settings)
        # Heads are masked at every position of a given answer, whatever generation does.
        self.how_to_score = {k: v for k, v in self.how.items() if k != "mask_prompt"} | dict(renormalise=renormalise)

    def __repr__(self):
        return f"{self.get_model_info()['method']} with {self.model.name}"

    def get_model_info(self):
        """What the harness stores with its results: models by their names, heads as "layer-head"."""
        found = self.how | self.how_to_score | dict(model=self.model, dtype=str(self.model.dtype),
                                                    template_args=self.template_args)
        found["method"], = cli.full_names([self.how["method"]], self.how.get("amateur"))
        return {name: [f"{layer}-{head}" for layer, head in value] if name in ("heads", "amateur_heads")
                else getattr(value, "name", value) for name, value in found.items()}

    @property
    def tokenizer_name(self):
        """Part of the name of files that hold prompts (--cache_requests), so it tells chat templates apart."""
        return f"{self.tokenizer.name}-{digest([self.tokenizer.chat_template, self.template_args])}".replace("/", "__")

    @property
    def max_length(self):
        return min(m.config.max_positions for m in (self.model, self.how.get("amateur") or self.model))

    @property
    def eot_token_id(self):
        own = self.tokenizer.core.token_to_id(self.tokenizer.special.get("eos_token", ""))
        return own if own is not None else next(iter(self.tokenizer.eos_ids), None)

    @property
    def prefix_token_id(self):
        """What a text without a context begins with: BOS, else the end token."""
        found = self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        if found is None:
            raise ValueError(f"{self.tokenizer.name} has no token that begins or ends a text")
        return found

    def tok_encode(self, string, add_special_tokens=None, **_):
        if add_special_tokens is None:      # not where the text spells the first of them itself
            add_special_tokens = not string.startswith(self.tokenizer.core.id_to_token(self.prefix_token_id))
        return self.tokenizer.encode(string, bos=add_special_tokens)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        """[(texts, context ids, answer ids)] → [(log p, whether greedy decoding gives the answer)].

        A context is read once for all its answers, and loses its beginning where it is too long."""
        contexts, out = {}, [None] * len(requests)
        for i, (_, context, answer) in enumerate(requests):
            if not 0 < len(answer) <= self.max_length:
                raise ValueError(f"an answer has {len(answer)} tokens; {self.model.name} scores 1 to {self.max_length}")
            room = self.max_length + 1 - len(answer)            # the last token of an answer is not read
            contexts.setdefault(tuple(context[-room:] or [self.prefix_token_id]), []).append(i)
            if len(context) > room:
                warnings.warn(f"contexts longer than {self.max_length} tokens lose their beginning", stacklevel=2)
        with tqdm(total=len(requests), desc="answers", disable=disable_tqdm) as bar:
            for context, places in contexts.items():
                for part in split(places, [len(requests[i][2]) for i in places]):
                    answers = [requests[i][2] for i in part]
                    found = baselines.score(self.model, context, answers, return_greedy=True, **self.how_to_score)
                    for i, one in zip(part, found, strict=True):
                        out[i] = one
                        if requests[i][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[i][0], one)
                    bar.update(len(part))
        return out

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Log-probability of whole texts, each read in windows of `max_length` tokens."""
        windows, texts, out = [], [], [0.0] * len(requests)
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                texts.append(i)
        for i, (log_p, _) in zip(texts, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            out[i] += log_p
        for request, log_p in zip(requests, out, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, log_p)
        return out

    def generate_until(self, requests, disable_tqdm=False):
        """Texts up to the first stop string. Long prompts go first: an estimate of the time is rather too high."""
        groups, out = {}, [None] * len(requests)
        for i, request in enumerate(requests):
            stop, most = self.read_generation(request.args[1])
            prompt = (self.tok_encode(request.args[0]) or [self.prefix_token_id])[most - self.max_length:]
            groups.setdefault((stop, most), []).append((prompt, i))
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm) as bar:
            for (stop, most), members in groups.items():
                members.sort(key=lambda member: -len(member[0]))
                for at in range(0, len(members), self.batch_size):
                    prompts, places = zip(*members[at:at + self.batch_size], strict=True)
                    found = baselines.generate(self.model, prompts, max_new_tokens=most, eos_ids=self.tokenizer.eos_ids,
                                               on_token=stop_at(self.tokenizer, stop, len(prompts)), **self.how)
                    for i, g in zip(places, found, strict=True):
                        out[i] = cut(self.tokenizer.decode(g.ids), stop)
                        self.cache_hook.add_partial("generate_until", requests[i].args, out[i])
                    bar.update(len(places))
        return out

    def read_generation(self, asked):
        """A task's `generation_kwargs` → stop strings, the end token's spelling among them, and tokens at most."""
        asked = normalize_gen_kwargs(asked, self.max_gen_toks)
        stop, most = asked.pop("until"), asked.pop("max_gen_toks")
        for name, value in asked.items():
            if name not in SAMPLING and (name not in GREEDY or value != GREEDY[name]):
                raise ValueError(f"a task asks for {name} {value!r}, but decoding is greedy here: another task, or "
                                 "--gen_kwargs do_sample=False,temperature=0,num_beams=1")
        if not 0 < most < self.max_length:
            raise ValueError(f"a task asks for {most} new tokens, but {self.model.name} reads {self.max_length} with "
                             "the prompt: --gen_kwargs max_gen_toks=N")
        end = [] if self.eot_token_id is None else [self.tokenizer.core.id_to_token(self.eot_token_id)]
        return tuple(dict.fromkeys(text for text in [*stop, *end] if text)), most

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        """The chat as text, without its system message where the template has none.

        add_generation_prompt=False leaves the last message open, to be continued."""
        make = self.render if add_generation_prompt else self.render_open
        try:
            return make(chat_history)
        except ValueError as error:
            rest = [message for message in chat_history if message["role"] != "system"]
            if rest == chat_history:
                raise
            warnings.warn(f"chats go without their system message: {error}", stacklevel=2)
            return make(rest)

    def render(self, messages, generation_prompt=True):
        return self.tokenizer.render(messages, generation_prompt, self.template_args)

    def render_open(self, messages):
        mark = "<the message ends here> "
        last = messages[-1] | dict(content=messages[-1]["content"] + mark)
        before, found, after = self.render([*messages[:-1], last], False).rpartition(mark.rstrip())
        if not found:
            raise ValueError(f"{self.tokenizer.name}: the chat template drops the last message; nothing to continue")
        return before if after.startswith(" ") else before.rstrip()     # a template that strips messages


def split(places, lengths):
    """Runs of places with at most AT_ONCE tokens together, or one place."""
    runs, total = [], AT_ONCE
    for place, length in zip(places, lengths, strict=True):
        if total + length > AT_ONCE:
            runs.append([])
            total = 0
        runs[-1].append(place)
        total += length
    return runs


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def main():
    p = cli.parser("Run tasks of lm-evaluation-harness with DeCoRe or a baseline. What is not listed here goes to "
                   "`lm_eval run`: --tasks, --num_fewshot, --apply_chat_template, --limit, --output_path …")
    cli.add_model_arguments(p)
    p.add_argument("--method", type=cli.method_name(baselines.METHODS), default="decore-entropy", metavar="M",
                   help=", ".join(METHODS))
    cli.add_method_arguments(p, METHODS)
    p.add_argument("--no-renormalise", dest="renormalise", action="store_false",
                   help="given answers: sum the contrasted scores as they are")
    p.add_argument("--batch-size", "--batch_size", type=cli.positive, default=1, metavar="B",
                   help="prompts that are continued at once")
    args, rest = p.parse_known_args()
    if args.method in REFUSED:
        raise ValueError(REFUSED[args.method])
    method, = cli.full_names([args.method], args.amateur)
    cli.check_options(args, [method], seeded=True)
    run, harness = read_rest(rest if args.seed is None else [*rest, f"--seed={args.seed}"])
    if args.template_args and not getattr(run, "apply_chat_template", False):
        raise ValueError("--template-args has no effect without --apply_chat_template")
    model, tokenizer, amateur = cli.load_models(args)
    if args.num_heads is None:
        args.num_heads = cli.default_num_heads(model)
    run.model = Harness(model, tokenizer, batch_size=args.batch_size, renormalise=args.renormalise,
                        template_args=cli.benchmark_template_args(tokenizer, args.template_args),
                        **cli.method_settings(method, args, model, amateur, choose_heads))
    facts = run.model.get_model_info()
    run.model_args, run.batch_size = facts | dict(pretrained=args.model), args.batch_size
    if run.use_cache:                       # whose keys are the texts alone
        run.use_cache += "-" + digest([facts, fingerprint(args.model), args.amateur and fingerprint(args.amateur)])
    harness.execute(run)


def read_rest(rest):
    """The arguments for `lm_eval run` as it reads them, and its command line."""
    from lm_eval._cli import HarnessCLI

    taken = [arg for arg in rest if arg.partition("=")[0] in ("-a", "--model_args", "-M")]
    if taken:
        raise ValueError(f"{taken[0]} has no effect: the model is --model's, its options are those of --help")
    sys.argv[1:] = ["run", *rest]
    if not rest or not ((run := (harness := HarnessCLI()).parse_args()).tasks or run.config):
        raise ValueError("--tasks is missing: name tasks of lm-evaluation-harness, such as --tasks triviaqa")
    return run, harness


if __name__ == "__main__":
    from lm_eval.utils import setup_logging
    setup_logging()
    sys.exit(cli.run(main))
