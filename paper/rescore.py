"""Computes the metrics of stored runs again."""

import json
from pathlib import Path

from cli.options import parser
from paper import judges, runfile, scores
from paper.report import stored
from paper.tasks import find_task, metrics
from runtime.errors import InputError


def main(argv):
    p = parser("Compute the metrics of runs again, from their lines, without their model.")
    p.prog += " rescore"
    p.add_argument(
        "files", nargs="+", type=Path, metavar="FILE.jsonl|DIR", help="runs, or folders of runs"
    )
    p.add_argument("--task", metavar="T", help="(default: the one in the run's header)")
    p.add_argument(
        "--rows", action="store_true", help="first print one JSON line per item with its values"
    )
    judges.add_arguments(p)
    args = p.parse_args(argv)
    paths = []
    for file in args.files:
        several = file.is_dir() or runfile.packed_file(file)
        paths += stored.run_files(file) if several else [file]
    if not paths:
        raise InputError(f"{args.files[0]} holds no runs")
    for path in paths:
        header, lines = runfile.read_run(path)
        if not lines or (args.task is None and not header):
            raise InputError(f"{path} holds no lines of items, or no header: then give --task")
        task = find_task(header.get("task") if args.task is None else args.task)
        lines = judges.judge(lines, path, task, judges.judges_of(args))
        values = metrics.compute(task, lines)
        for line, of_line in zip(lines, values) if args.rows else ():
            print(json.dumps({"id": line.get("id")} | of_line, ensure_ascii=False))
        scores.print_means(values, {} if paths == args.files[:1] else {"run": str(path)})
