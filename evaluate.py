"""Run the paper's benchmarks: task × method × model → one JSON line per example, and their means.

    python evaluate.py --task nq-swap --method greedy,decore-entropy --model M --data FILE
                       --demos FILE --out DIR
    python evaluate.py --task nq-swap --data FILE --demos FILE --dry-run    print the prompts
    python evaluate.py fetch DIR                                            download the data
    python evaluate.py choose --data FILE --model M                         choose a method
    python evaluate.py paper --model M --data DIR --out DIR [--plan]        the paper's rows
    python evaluate.py rescore --task nq-swap FILE.jsonl                    recompute the metrics
    python evaluate.py report DIR                                           runs beside the paper's
    python evaluate.py unpack FILE.jsonl.xz DIR                             take out packed runs

Lists with commas and `--task all` make a sweep. An interrupted run continues
when the command is started again. Under torchrun the ranks share the examples; with --tp K, K ranks
share one model.

In this file: from the command line to the runs. paper/options.py parses it, paper/plan.py finds the
paper's rows, paper/benchmark.py makes their prompts, paper/running.py decodes them,
paper/runfile.py writes their files. What needs tensors is imported where runs begin."""

import itertools
import json
import sys
from pathlib import Path

from cli.entry import continuing, explain, run_program
from cli.options import did_you_mean, fit, full_names, say_measures, setups
from paper import choose, fetch, judges, options, plan, report, rescore, scores, unpack
from paper.benchmark import load_benchmark
from paper.runfile import continued, make_header, run_name
from paper.tasks import find_tasks, metrics, prompts, with_prompt
from runtime.errors import InputError
from runtime.progress import say


def main():
    commands = {
        "choose": choose.main,
        "fetch": fetch.main,
        "paper": paper,
        "rescore": rescore.main,
        "report": report.main,
        "unpack": unpack.main,
    }
    argv = sys.argv[1:]
    if argv and argv[0] in commands:
        commands[argv[0]](argv[1:])
    elif argv and not argv[0].startswith("-"):
        near = did_you_mean(argv[0], commands)
        raise InputError(f"unknown command {argv[0]!r}{near}; known: {', '.join(commands)}")
    else:
        evaluate(argv)


def evaluate(argv):
    """The tasks and setups of the command line."""
    args = options.parse(argv)
    own = args.template, args.system, args.closed_book
    tasks = [with_prompt(task, *own) for task in find_tasks(args.task).values()]
    if args.dry_run:
        print_prompts(tasks, args)
        return
    methods = full_names(args.method, args.amateur)
    sweep(args, [(t, setup, {}) for t in tasks for setup in setups(args, methods, t.choice)])


def print_prompts(tasks, how):
    """A JSON line for each prompt."""
    for bench in [load_benchmark(task, how) for task in tasks]:
        for item in bench.items:
            line = prompts.dry_run(bench.task, item, bench.demos, how.layout or "chat")
            print(json.dumps(line, ensure_ascii=False))


def paper(argv):
    """The paper's runs of a model, or the list of them."""
    args = options.parse_paper(argv)
    planned = plan.planned_runs(
        args.like or args.model, args.table, find_tasks(args.task), args.method
    )
    if args.plan:
        plan.show(planned, args)
        return
    for checkpoint in dict.fromkeys(run.checkpoint for run in planned):
        if checkpoint and args.like:
            say("the runs of ITI are left out: its checkpoints are not --model")
            continue
        selected = [run for run in planned if run.checkpoint == checkpoint]
        wanted = [(run.task, run.setup, run.header(args.like)) for run in selected]
        sweep(options.for_planned(args, selected), wanted, lenient=True)


@continuing()
def sweep(how, wanted, lenient=False):
    """Run tasks with setups, (task, setup, more fields of the header) each, in this order, those of
    one task together. Nothing is written before everything is checked.

    how: the parsed command line. lenient: leave out runs that do not fit the model, in place of an
    InputError."""
    from cli import models
    from paper.running import run_benchmark
    from runtime.parallel import Ranks

    ranks = Ranks(how.tp, how.device)
    checkpoint, tokenizer, of_amateur = models.read_models(how)
    if lenient:
        plan.say_size(how, checkpoint)
    fitting = fitting_runs(how, wanted, checkpoint, of_amateur, lenient)
    model, amateur = models.load_models(checkpoint, of_amateur, how, ranks.shard)
    runs = make_runs(how, fitting, model, amateur, ranks)
    ranks.share(lambda: check_files(runs))
    say_heads(runs, how)
    for task, of_task in itertools.groupby(runs, lambda run: run.bench.task):
        of_task = list(of_task)
        lines = run_benchmark(of_task, model, tokenizer, ranks)
        for run, answers in zip(of_task, lines or []):
            answers = judges.judge(answers, run.path, task)
            values = scores.values_of(run.path, task, answers)
            scores.print_means(values, {"run": str(run.path)})


def make_runs(how, fitting, model, amateur, ranks):
    """The `Run` of each result of `fitting_runs`."""
    from paper.running import Run
    from runtime.checks import check_draft

    checkpoints = [reader and reader.checkpoint for reader in (model, amateur)]
    fingerprints = ranks.share(lambda: [c and c.fingerprint for c in checkpoints])
    runs = []
    for bench, setup, more in fitting:
        method = setup.record(amateur)
        method.check(model)  # `fit` did so with what is known before the weights are read
        check_draft(how.draft or 0, method)
        header = make_header(bench, setup, how, model, fingerprints, more)
        path = Path(how.out) / f"{run_name(header)}.jsonl"
        runs.append(Run(bench, setup, header, method, path))
    return runs


def say_heads(runs, how):
    """Print what ranks the heads of runs, and which of their questions did."""
    from paper import questions

    say_measures([run.setup for run in runs], how)
    by_effect = [run for run in runs if run.setup.head_file and run.setup.measure == "effect"]
    measured = {(run.bench.task, run.setup.head_file): run.bench for run in by_effect}
    for (_, head_file), bench in measured.items():
        questions.say_overlap(bench, head_file)


def check_files(runs):
    """InputError for a stored file that its run cannot continue."""
    for run in runs:
        continued(run.path, run.header, run.bench.questions)


def fitting_runs(how, wanted, model, amateur, lenient):
    """[(benchmark, fitted setup, more fields of the header)] of the wanted runs that fit the model,
    its amateur and the prompts.

    model, amateur: as `cli.models.Facts`. Prints a line for each task and method that does not fit.
    InputError if none fits."""
    fitted, problems = [], []
    for task, setup, more in wanted:
        try:
            setup = fit(setup, how, model, amateur)
            fitted.append((task, setup, more))
        except ValueError as error:
            if not lenient:
                raise
            problems.append(f"{task.name} with {setup.method} is left out: {explain(error)}")
    benches = {}
    for task in dict.fromkeys(task for task, _, _ in fitted):
        for problem in metrics.problems(task):
            say(f"{task.name}: {problem}")
        benches[task] = load_benchmark(task, how, model)
    fitting = []
    for task, setup, more in fitted:
        bench = benches[task]
        problem = prompt_problem(setup, bench, [model, amateur] if setup.amateur else [model])
        if problem:
            problems.append(f"{task.name} with {setup.method} is left out: {problem}")
        else:
            fitting.append((bench, setup, more))
    if not fitting:
        raise InputError(problems[0])
    if how.template_args and all(bench.layout == "plain" for bench, _, _ in fitting):
        raise InputError("--template-args has no effect: no prompt goes through a chat template")
    for problem in dict.fromkeys(problems):
        say(problem)
    return fitting


def prompt_problem(setup, bench, readers):
    """Why a setup cannot read the prompts; None if it can. readers: the models that read them."""
    # The last token of an answer is not read.
    longest = max(len(e.prompt) + max(map(len, e.answers or [[0]])) - 1 for e in bench.encoded)
    context, reader = min((model.config.max_positions, model.name) for model in readers)
    if longest > context:
        return f"its longest prompt has {longest} tokens, but {reader} only {context} positions"
    if setup.method != "cad":
        return None
    if not bench.task.without_context:
        return "its prompts have no context to leave out"
    if n := sum(e.prompt[-1:] != e.without_context[-1:] for e in bench.encoded):
        return f"without context {n} of its prompts end in another token (--layout {bench.layout})"


if __name__ == "__main__":
    sys.exit(run_program(main))
