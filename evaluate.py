"""Run the paper's benchmarks: a task × a method × a model → one JSON line per example, and a table.

    python evaluate.py --task nq-swap --method greedy,decore-entropy --model M --data FILE --demos FILE --out DIR
    python evaluate.py --task nq-swap --data FILE --demos FILE --dry-run      the prompts, without a model
    python evaluate.py rescore --task nq-swap FILE.jsonl                      the metrics again, without a model
    python evaluate.py report DIR                                             a folder's runs beside the paper

Lists with commas, `--task all` and `--task miniature` make a sweep. A run that was interrupted goes on when it is
started again. Under torchrun the ranks share the examples; with --tp K, K ranks share one model."""

import argparse
import datetime
import gc
import itertools
import json
import math
import platform
import shlex
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm

import baselines
import cli
import report
from heads import choose_heads
from report import stored
from runtime import jsonl
from runtime.config import Config
from runtime.files import commit, short_hash
from runtime.parallel import Ranks
from runtime.weights import checkpoint_folder, fingerprint
from tasks import MINIATURE, PAPER, find, judges, metrics, prompts, runs, sources
from tokenizer import Tokenizer

QUICK = ("short_answer", "first_sentence", "musique", "multiple_choice", "memotrap", "judged")
PROMPT_FIELDS = ("context", "title", "text", "passages", "without_context")     # not stored: they are in the data
NO_DAY = "1970-01-01"                   # in prompts that are compared whatever the day
AUTO = {"cuda": 64}                     # where --batch-size auto begins, 16 elsewhere; out of memory, it is halved


def run(task, items, demos, model, tokenizer, contrast, settings, path, ranks, layout, batch_size="auto",
        max_new_tokens=None, renormalise=True):
    """Decode what is missing in the file → the lines of all items, on every rank."""
    began = ranks.share(lambda: runs.began(path, settings))
    template_args = settings.get("template_args")
    encoded = encode(task, items, demos, tokenizer, layout, began, template_args)
    check_lengths(task, encoded, model)
    asked = {e.index: as_asked(items[e.index], e) for e in encoded}
    if encode(task, items[:1], demos, tokenizer, layout, NO_DAY, template_args) != encoded[:1]:
        for e in encode(task, items, demos, tokenizer, layout, NO_DAY, template_args):
            asked[e.index]["undated_sha256"] = digest(e)
    with ExitStack() as held:
        def open_run():
            held.enter_context(jsonl.locked(path))
            return runs.continue_run(path, settings, asked, lambda rows: metrics.check_rows(task, rows, path))

        done, mark = ranks.share(open_run)
        size = AUTO.get(model.device.type, 16) if batch_size == "auto" else batch_size
        batches = [batch for batch in make_batches(encoded, size) if any(e.index not in done for e in batch)]
        most = size

        def attempt(batch):
            try:
                return decode_batch(task, batch, items, model, tokenizer, contrast,
                                    max_new_tokens or task.max_new_tokens, renormalise), None
            except RuntimeError as error:
                if not cli.out_of_memory(error):
                    raise
                return None, error.with_traceback(None)         # the traceback would keep the batch's tensors

        def decode(batch):
            nonlocal most
            found = []
            while len(found) < len(batch):
                results, error = attempt(batch[len(found):len(found) + most])
                # Ranks that share a model go on with the same size, also where one of them alone had no room.
                if not model.shard.all_reduce(torch.tensor([float(results is None)], device=model.device)).item():
                    found += results
                elif batch_size != "auto" or most == 1:
                    raise error or torch.OutOfMemoryError("another rank is out of memory")
                else:
                    most //= 2
                    make_room(model)
            return [asked[e.index] | result | mark for e, result in zip(batch, found, strict=True)]

        with tqdm(total=len(items), initial=len(done), desc=path.stem, unit="ex", disable=ranks.rank > 0) as bar:
            score = Running(task, done.values())
            for turn in range(math.ceil(len(batches) / ranks.replicas)):
                at = turn * ranks.replicas + ranks.replica
                mine = batches[at] if at < len(batches) else []
                lines = [one for one in ranks.gather(lambda mine=mine: decode(mine)) if one["index"] not in done]
                if ranks.rank == 0:
                    jsonl.append(path, lines)
                done |= {one["index"]: one for one in lines}
                bar.update(len(lines))
                bar.set_postfix_str(score.add(lines))
        lines = [done[item["index"]] for item in items]
        if ranks.rank == 0:
            runs.finish(path, lines)
    return lines


def make_room(model):
    vars(model).pop("graphs", None)
    gc.collect()
    {"cuda": torch.cuda.empty_cache, "mps": torch.mps.empty_cache}.get(model.device.type, lambda: None)()


def encode(task, items, demos, tokenizer, layout, day, template_args=None):
    """The token ids of all items; a chat template that prints today's date prints this day."""
    tokenizer.today = datetime.date.fromisoformat(day)
    end = prompts.end_of_turn(tokenizer, template_args) if task.choice and layout != "plain" else ()
    return [prompts.encode(task, item, demos, tokenizer, layout, end, template_args) for item in items]


def as_asked(item, encoded):
    """The beginning of an item's row: all that does not depend on the answer."""
    stored = {name: value for name, value in item.items() if name not in PROMPT_FIELDS}
    return json.loads(json.dumps(stored | {"prompt_sha256": digest(encoded), "prompt_tokens": len(encoded.prompt)}))


def digest(encoded):
    return short_hash(json.dumps([encoded.prompt, encoded.without_context]).encode())


def check_lengths(task, encoded, model):
    """Nothing is ever cut off, so a prompt that does not fit is refused before the first one is decoded."""
    lengths = [len(e.prompt) + max(map(len, e.answers or [[]])) for e in encoded]
    most = model.config.max_positions
    over = sum(length > most for length in lengths)
    if over:
        raise ValueError(f"{task.name}: {over} of {len(encoded)} prompts are longer than the {most} positions of "
                         f"{model.name} (the longest: {max(lengths)} tokens); prompts are not cut: use another model")


def make_batches(encoded, size):
    """Items of similar length together, the longest first; one item per batch in multiple choice, whose candidates are
    the batch."""
    longest_first = sorted(encoded, key=lambda e: (-len(e.prompt), e.index))
    if any(e.answers for e in encoded):
        size = 1
    return [longest_first[start:start + size] for start in range(0, len(encoded), size)]


def decode_batch(task, batch, items, model, tokenizer, contrast, max_new_tokens, renormalise):
    """One batch → its results, the second halves of its rows."""
    start = time.perf_counter()
    extra = {}
    if contrast["method"] == "cad":
        if any(not e.without_context for e in batch):
            raise ValueError(f"{task.name} has no prompt without context, which cad contrasts with")
        name = "prompt_ids_without_context" if task.choice else "ids_without_context"
        extra[name] = batch[0].without_context if task.choice else [e.without_context for e in batch]
    if task.choice:
        e = batch[0]
        # Given answers are always scored with the heads masked at every position.
        contrast = {name: value for name, value in contrast.items() if name != "mask_prompt"}
        scores = baselines.score(model, e.prompt, e.answers, renormalise=renormalise, **contrast, **extra)
        n_true = items[e.index]["n_true"]
        found = [{"scores_true": scores[:n_true], "scores_false": scores[n_true:], "merged": e.merged,
                  "tokens": sum(map(len, e.answers))}]
    else:
        out = baselines.generate(model, [e.prompt for e in batch], max_new_tokens=max_new_tokens,
                                 eos_ids=tokenizer.eos_ids, **contrast, **extra)
        found = [{"prediction": tokenizer.decode(g.ids[:-1] if g.stop == "eos" else g.ids), "ids": g.ids,
                  "alphas": rounded(g.alphas), "entropies": rounded(g.entropies), "stop": g.stop} for g in out]
    seconds = round((time.perf_counter() - start) / len(batch), 6)
    return [result | {"seconds": seconds} for result in found]


def rounded(numbers):
    return [round(number, 6) for number in numbers]


class Running:
    """The mean of the task's headline so far."""

    def __init__(self, task, lines):
        self.task, self.values = task, []
        self.add(lines)

    def add(self, lines):
        found = metrics.score(self.task, list(lines), only=QUICK) if self.task.running else []
        self.values += [row[self.task.running] for row in found if row.get(self.task.running) is not None]
        return f"{self.task.running} {sum(self.values) / len(self.values):.3f}" if self.values else ""


# ------------------------------------------------------------------------------------------------------- command line

# Option → whether a task uses it. The other options are those of methods, runtime/cli.py.
OF_TASKS = {
    "max_new_tokens": lambda task: not task.choice,
    "batch_size": lambda task: not task.choice,
    "mask_prompt": lambda task: not task.choice,        # given answers are scored with heads masked everywhere
    "relative_top": lambda task: not task.choice,
    "repetition_penalty": lambda task: not task.choice,
    "no_renormalise": lambda task: task.choice,
    "layout": lambda task: task.layout is None,
    "demos": lambda task: task.shots,
    "judge": lambda task: metrics.judged in task.metrics,
}
UNCHANGED = ("greedy", "masked", "ad")                  # methods whose scores --no-renormalise leaves as they are


def main():
    commands = {"rescore": rescore, "report": report.main}
    command = commands.get(sys.argv[1] if len(sys.argv) > 1 else "")
    return command(sys.argv[2:]) if command else evaluate(sys.argv[1:])


def evaluate(argv):
    args = arguments().parse_args(argv)
    tasks, methods = chosen_tasks(args.task), cli.full_names(args.method, args.amateur)
    check_options(args, tasks, methods)
    cli.check_options(args, methods, seeded=True)
    args.data, args.demos = (None if value is None else Path(value) for value in (args.data, args.demos))
    seeds = args.seed or [cli.SEED]
    plan = []
    for task in tasks:          # all of them before the first run: a missing file should not end a night's sweep
        plan.append((task, *sources.load(task, args.data, args.demos, args.limit, seeds[0])))
    cli.check_options(args, methods, seeded=any((record or {}).get("seed") is not None for *_, record in plan))
    if args.dry_run:
        return dry_run(args, plan)
    ranks = Ranks(args.tp, args.device)
    model, tokenizer, amateur = cli.load_models(args, ranks.shard())
    made_by = ranks.share(lambda: [fingerprint(name) if name else None for name in (args.model, args.amateur)])
    template_args = cli.benchmark_template_args(tokenizer, args.template_args)
    layouts = [task.layout or args.layout or native_layout(tokenizer, model.config) for task in tasks]
    if args.template_args and set(layouts) == {"plain"}:
        raise ValueError("--template-args has no effect: no prompt goes through a chat template")
    for (task, items, records, demos, demo_record), layout in zip(plan, layouts, strict=True):
        for method, n, alpha, seed in combinations(args, methods, model):
            options = argparse.Namespace(**vars(args) | dict(num_heads=n, alpha=alpha, seed=seed))
            how = cli.method_settings(method, options, model, amateur, choose_heads)
            about = described(method, how, n, args.random_heads)
            settings = {
                "task": task.name, "version": task.version, "layout": layout, "n": len(items), "limit": args.limit,
                "template_args": None if layout == "plain" else template_args,
                "model": model.name, **about, "fingerprint": made_by[0],
                "amateur_fingerprint": made_by[1] if about["amateur"] else None,
                "max_new_tokens": None if task.choice else args.max_new_tokens or task.max_new_tokens,
                "renormalise": not args.no_renormalise if task.choice else None,
                "data": records, "demos": demo_record, "seed": seeds[0] if seed is None else seed,
                "batch_size": args.batch_size or "auto", "tp": ranks.tp, **surroundings(model)}
            path = Path(args.out) / f"{run_name(settings)}.jsonl"
            lines = run(task, items, demos, model, tokenizer, how, settings, path, ranks, layout,
                        args.batch_size or "auto", args.max_new_tokens, not args.no_renormalise)
            if ranks.rank == 0:
                lines = judges.judge(lines, path, task, args)
                print_means(lines, stored.values_of(path, task, lines), {"run": str(path)})


def arguments():
    p = cli.parser("Run benchmarks: a task × a method × a model.", epilog="Two more commands, each with a --help: "
                   "`python evaluate.py rescore FILE` computes the metrics of stored runs again, "
                   "`python evaluate.py report DIR` makes tables of a folder's runs.")
    cli.add_model_arguments(p)
    p.add_argument("--task", required=True, metavar="T[,T…]",
                   help=f"{', '.join(task.name for task in PAPER)}; all: these; miniature: the miniature's splits")
    p.add_argument("--method", default=["decore-entropy"], type=cli.comma_list(cli.method_name(baselines.METHODS)),
                   metavar="M[,M…]", help=f"{', '.join(baselines.METHODS)} (default: decore-entropy)")
    cli.add_method_arguments(p, baselines.METHODS, several=True, leave_out=("without_context", "without_context_ids"))
    p.add_argument("--no-renormalise", action="store_true",
                   help="multiple choice: sum the contrasted scores as they are")
    p.add_argument("--data", metavar="FILE", help="the data: a file, or a folder that holds it (default: public home)")
    p.add_argument("--demos", metavar="FILE", help="demonstrations: JSON lines, or a folder (default: from the data's "
                   "folder, else from the training split, else the first items of the data)")
    p.add_argument("--layout", choices=prompts.LAYOUTS, help="how prompts are laid out (default: as the model wants)")
    p.add_argument("--limit", type=cli.positive, metavar="K", help="the first K items (default: all)")
    p.add_argument("--max-new-tokens", type=cli.positive, metavar="N", help="(default: the task's own)")
    p.add_argument("--batch-size", type=batch_size, metavar="B",
                   help="prompts at once; auto: as many as fit, at most 16 on a CPU and 64 on a GPU (default: auto)")
    p.add_argument("--tp", type=cli.positive, default=1, metavar="K", help="ranks that share one model (torchrun)")
    p.add_argument("--out", default="results", metavar="DIR", help="folder of the runs")
    p.add_argument("--dry-run", action="store_true", help="print the prompts as JSON lines and load no model")
    judges.add_arguments(p)
    return p


def batch_size(text):
    return "auto" if text == "auto" else cli.positive(text)


def chosen_tasks(text):
    groups = {"all": [task.name for task in PAPER], "miniature": [task.name for task in MINIATURE]}
    chosen = [name for part in text.split(",") for name in groups.get(part, [part])]
    return [find(name) for name in dict.fromkeys(chosen)]


def check_options(args, tasks, methods=()):
    """ValueError for an option that was given and has no effect on any of the tasks, or on how answers are scored."""
    given = vars(args) | {"judge": args.judge or args.judge_url or args.judge_models != judges.OPEN}
    for name, uses in OF_TASKS.items():
        if given.get(name) not in (None, False) and not any(map(uses, tasks)):
            raise ValueError(f"{cli.flag(name)} has no effect on {', '.join(task.name for task in tasks)}")
    if given["judge"] and not args.judge and not args.judge_url:
        raise ValueError("--judge-models has no effect without --judge or --judge-url")
    if given.get("no_renormalise") and set(methods) <= set(UNCHANGED):
        raise ValueError(f"--no-renormalise has no effect on {', '.join(methods)}")


def combinations(args, methods, model):
    """(method, number of heads or None, α or None, seed of random heads or None) of a sweep, each once."""
    for method in methods:
        def swept(name, values, method=method):
            return values if method in cli.OPTIONS[name][0] else [None]
        yield from itertools.product(
            [method], swept("num_heads", args.num_heads or [cli.default_num_heads(model)]),
            swept("alpha", args.alpha or [cli.DEFAULTS["alpha"]]),
            swept("random_heads", args.seed or [cli.SEED]) if args.random_heads else [None])


def described(method, how, n, random_heads):
    """What the settings say of a method and its arguments."""
    heads = how.get("heads", how.get("amateur_heads"))
    plain = {name: value for name, value in how.items() if name not in ("heads", "amateur_heads", "amateur")}
    return plain | {
        "method": method, "num_heads": n, "heads": heads and [f"{layer}-{head}" for layer, head in heads],
        "random_heads": random_heads if heads and "heads" in how else None,
        "amateur": how["amateur"].name if "amateur" in how else None}


def run_name(settings):
    """Task, model, method and what is not as usual. What is not in the name has to agree with the file's first line."""
    parts = [settings["task"], settings["model"].split("/")[-1], settings["method"]]
    parts += [f"n{settings['num_heads']}"] if settings["num_heads"] is not None else []
    parts += [f"random-{settings['random_heads']}-seed{settings['seed']}"] if settings["random_heads"] else []
    parts += [f"a{settings['alpha']:g}"] if "alpha" in settings else []
    parts += [f"cap{settings['alpha_cap']:g}"] if settings.get("alpha_cap") is not None else []
    parts += ["scaled"] if settings.get("scale_alpha") else []
    parts += ["query"] if settings.get("mask") == "query" else []
    parts += ["mask-prompt"] if settings.get("mask_prompt") else []
    parts += [settings["amateur"].split("/")[-1]] if settings["amateur"] else []
    return ".".join(parts)


def native_layout(tokenizer, config):
    if not tokenizer.has_chat_template:
        return "plain"
    return "mistral" if config.model_type == "mistral" else "chat"


def surroundings(model):
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.machine()
    return {"dtype": str(model.dtype).removeprefix("torch."), "device": f"{model.device.type} ({device})",
            "versions": {name: version(name) for name in ("torch", "tokenizers", "numpy")}
            | {"python": platform.python_version()},
            "commit": commit(), "date": str(datetime.date.today()),
            "command": shlex.join(["evaluate.py", *sys.argv[1:]])}


def dry_run(args, plan):
    layout = args.layout
    if layout is None and Path(args.model).resolve() != cli.MINIATURE:
        config = Config.from_checkpoint(checkpoint_folder(args.model, weights=False))
        layout = native_layout(Tokenizer.load(args.model), config)
    for task, items, _, demos, _ in plan:
        for item in items:
            print(json.dumps(prompts.dry_run(task, item, demos, layout or "chat"), ensure_ascii=False))


def rescore(argv):
    p = cli.parser("Compute the metrics of runs again, from their lines, without a model.")
    p.prog += " rescore"
    p.add_argument("files", nargs="+", metavar="FILE.jsonl|DIR", help="runs, or folders of runs")
    p.add_argument("--task", metavar="T", help="(default: as the run's settings say)")
    p.add_argument("--rows", action="store_true", help="first one JSON line per row with its values")
    judges.add_arguments(p)
    args = p.parse_args(argv)
    paths = [path for name in map(Path, args.files) for path in (run_files(name) if name.is_dir() else [name])]
    for path in paths:
        settings, lines = runs.read_run(path)
        if args.task is None and settings is None:
            raise ValueError(f"{path} has no settings in its first line: give --task")
        task = find(args.task or settings["task"])
        check_options(args, [task])
        if not lines:
            raise ValueError(f"{path} holds no rows")
        metrics.check_rows(task, lines, path)
        lines = judges.judge(lines, path, task, args)
        values = metrics.score(task, lines)
        for row, found in zip(lines, values, strict=True) if args.rows else ():
            print(json.dumps({"id": row.get("id")} | found, ensure_ascii=False))
        print_means(lines, values, {} if paths == [Path(args.files[0])] else {"run": str(path)})


def run_files(folder):
    found = [path for path in sorted(folder.rglob("*.jsonl*")) if path.name.endswith((".jsonl", ".jsonl.gz"))
             and ".judged." not in path.name]
    if not found:
        raise ValueError(f"{folder}: no runs here")
    return found


def print_means(lines, values, about):
    """One JSON line; on standard error how many rows are in no mean."""
    shown = sum(bool(row.get("demonstration")) for row in lines)
    if shown:
        print(f"{shown} of {len(lines)} items are demonstrations: only the published scores count them",
              file=sys.stderr)
    print(json.dumps(about | {"metrics": metrics.summary(values), "n": len(lines)}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
