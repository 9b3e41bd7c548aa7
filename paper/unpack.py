"""Takes runs out of packed files."""

from pathlib import Path

from cli.options import parser
from paper.report.stored import run_files
from paper.runfile import packed_file, unpacked
from runtime.errors import InputError
from runtime.files import append_bytes, draft


def main(argv):
    p = parser("Take runs out of packed files. The command of a run then continues it.")
    p.prog += " unpack"
    p.add_argument("sources", nargs="+", type=Path, metavar="FILE.jsonl.xz|DIR", help="packed runs")
    p.add_argument("out", type=Path, metavar="OUT", help="folder to write them to, by their data")
    p.add_argument(
        "--only", metavar="GLOB", default="*", help="names of runs, such as '*implied.false/*cad*'"
    )
    args = p.parse_args(argv)
    paths = {}  # of the packed run → of its file
    for source in args.sources:
        for path in run_files(source):
            if packed_file(path) and path.match(args.only):
                paths[path] = args.out / path.relative_to(packed_file(path))
    if not paths:
        raise InputError(f"{args.sources[0]} holds no packed run {args.only}")
    for path in paths.values():
        if path.exists():
            raise InputError(f"{path} is there already; choose another folder")
    for path, out in paths.items():
        with draft(out) as new:
            append_bytes(new, b"".join(unpacked(packed_file(path))[path]))
    print(f"{len(paths)} runs in {args.out}")
