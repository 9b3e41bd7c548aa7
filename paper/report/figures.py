"""The paper's figures of stored runs (report DIR --plots OUT) and of head files (report heads).

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and dashes
repeat the information. The foot of each figure says which runs it shows."""

import itertools
import textwrap
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from paper import printed
from paper.printed import TASKS
from paper.report import significance, tables
from paper.report.frame import typical
from paper.report.stored import METHODS

matplotlib.rcParams.update(
    {
        "font.size": 7,
        "axes.titlesize": 8,
        "legend.frameon": False,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "savefig.dpi": 150,
    }
)
BLACK, BLUE, GREEN, RED = "#000000", "#0072B2", "#009E73", "#D55E00"
OTHERS = "#66A182 #F0E442 #882255 #7A5C00 #CC79A7 #56B4E9 #E69F00 #7F7F7F".split()
COLOUR = dict(zip(METHODS, [BLACK, BLUE, GREEN, RED, *OTHERS], strict=True))
NATS = "base entropy, nats per token"
LEVELS = {None: ":", "output": "-.", "query": "--"}  # greedy, ways of masking


def draw_all(frame, folder):
    """Writes every figure that the runs have data for. Returns [(path, caption)]."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for title, same in frame.groupby("title"):
        for group, tasks in printed.GROUPS.items():
            shown = same[same["task"].isin(tasks)]
            if shown.empty:
                continue
            for kind, (draw, caption) in FIGURES.items():
                if figure := draw(shown):
                    parts = dict.fromkeys([kind, title, group.lower()])
                    name = "-".join(parts).replace(", ", "-").replace(" ", "-")
                    path = folder / f"{name}.png"
                    figure.savefig(path)
                    pictures.append((path, f"{title}: {caption}"))
    return pictures


def figure_of(panels, draw, runs, *notes, height=2.1, **options):
    """A figure of the page's width; None without panels. `draw(axes, *panel)` draws a panel.

    The foot says which runs it shows. `draw` may add to them. height: of a row of panels, in
    inches."""
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(7.6, rows * height + 0.9), layout="constrained")
    handles = {}
    axes = figure.subplots(rows, columns, squeeze=False, **options).flat
    for ax, panel in itertools.zip_longest(axes, panels):
        ax.locator_params(axis="x", nbins=4)
        if panel is None:
            ax.set_axis_off()
        else:
            draw(ax, *panel)
    for ax in figure.axes:
        lines, labels = ax.get_legend_handles_labels()
        handles |= zip(labels, lines)
    if handles:
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=2)
        figure.set_figheight(figure.get_figheight() + 0.09 * len(handles))
    facts = {
        "model": [Path(run.header["model"]).name for run in runs],
        "n": [f"{run.task} {len(run.lines):,}" for run in runs],
        "seeds of random heads": [run.header.get("seed") for run in runs if run.setup.random_heads],
        "dtype": [run.precision["dtype"] for run in runs],
        "commit": [str(run.header.get("commit"))[:8] for run in runs],
    }
    texts = [
        f"{name}: {', '.join(map(str, dict.fromkeys(values)))}"
        for name, values in facts.items()
        if values
    ]
    foot = textwrap.fill(" · ".join([*texts, *notes]), 150, break_on_hyphens=False)
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=6.5, color="#444444")
    return figure


# Scores against N and against α


def heads_figure(frame):
    """Retrieval heads, and random ones with their range."""
    return curve_figure(
        frame,
        ("num_heads", "random_heads"),
        "heads masked, N",
        METHODS,
        ["greedy"],
        "band: range of the draws of random heads",
    )


def alpha_figure(frame):
    """DeCoRe static, a line per N."""
    fields = "alpha", "num_heads"
    return curve_figure(frame, fields, "α", ["decore-static"], ["greedy", "decore-entropy"])


def curve_figure(frame, fields, xlabel, methods, levels, *notes):
    """Score against the first of two fields, "num_heads" or "alpha": a panel per task.

    It shows setups of the methods that differ from a typical one in the fields at most, and
    `levels`: methods that have horizontal lines."""
    field, _ = fields
    usual = typical(frame)
    free = dict.fromkeys(fields)
    kinds = {replace(run.setup, **free) for run in usual["run"] if run.setup.method in methods}
    swept = frame[[replace(run.setup, **free) in kinds for run in frame["run"]]]
    panels = defaultdict(list)
    looks = itertools.cycle(zip([BLUE, GREEN, *OTHERS[3:]], "ovDs^P<"))
    styles = {}
    for task, name, curve in tables.curves(swept, field):
        if name not in styles:
            colour, marker = next(looks)
            styles[name] = {"color": colour, "marker": marker, "label": name}
        panels[task].append((curve, styles[name]))
    runs = []

    def draw(ax, task, curves):
        draw_curves(ax, field, curves)
        for curve, _ in curves:
            runs.extend(curve["run"])
        lines = usual[usual["headline"] & (usual["task"] == task) & usual["method"].isin(levels)]
        for run, value in zip(lines["run"], lines["value"]):
            dash = LEVELS[run.setup.mask]
            colour = COLOUR[run.setup.method]
            ax.axhline(value, linestyle=dash, linewidth=1, color=colour, label=str(run.setup))
            runs.append(run)
        ax.set(title=TASKS[task][0], xlabel=xlabel, ylabel=printed.headline(task)[1])

    return figure_of(panels.items(), draw, runs, *notes)


def draw_curves(ax, field, curves):
    """Means over the draws; the range of random heads; the paper's points in the same style."""
    papers = {}
    for curve, style in curves:
        run = curve["run"].iloc[0]
        papers.setdefault(printed.method_of(run.setup), (run, style))
        draws = curve.groupby(field)["value"]
        if run.setup.random_heads:
            x = list(draws.groups)
            ax.fill_between(x, draws.min(), draws.max(), color=style["color"], alpha=0.13)
            style = style | {"linestyle": "--", "markerfacecolor": "white"}
        ax.plot(draws.mean(), markersize=4, linewidth=1.3, **style)
    for method, (run, style) in papers.items():
        if points := printed.points(field, run.paper_model, run.task, method):
            style = style | {"label": f"the paper: {METHODS.get(method, method)}"}
            ax.plot(*np.transpose(points), ":", markersize=3, linewidth=0.8, alpha=0.6, **style)


# Entropies


def entropy_figure(frame):
    """Base entropy per token of each method."""
    shown = typical(frame[frame["metric"] == "entropy"])
    setups = list(shown["setup"].unique())

    def draw(ax, task, same):
        for run in same["run"]:
            violin = ax.violinplot(
                [run.entropies],
                [-setups.index(str(run.setup))],
                orientation="horizontal",
                side="high",
                widths=1.5,
                bw_method=0.25,
                showmeans=True,
                showextrema=False,
            )
            for part in (*violin["bodies"], violin["cmeans"]):
                part.set_color(COLOUR[run.setup.method])
        ax.set_yticks(range(0, -len(setups), -1), setups)
        ax.set(title=TASKS[task][0], xlabel=NATS)

    panels = list(shown.groupby("task", observed=True))
    height = 0.65 + 0.24 * len(setups)
    return figure_of(panels, draw, shown["run"], "density and mean", height=height, sharey=True)


def correctness_figure(frame):
    """Entropies of correct and incorrect answers, and the chance of a correct answer."""
    methods = ("greedy", "dola-low", "decore-entropy")
    panels = [panel for panel in tables.judged_answers(frame) if panel[0].setup.method in methods]
    runs = [run for run, *_ in panels]
    return figure_of(panels, draw_correctness, runs, "vertical lines: means")


def draw_correctness(ax, run, entropies, right):
    """Bars and vertical lines: densities and means. Dots: tenths of the answers. Curve: a logistic
    regression."""
    end = max(entropies.max(), 1e-6)
    bars = ax.twinx()
    for name, chosen, colour in (("correct", right, BLUE), ("incorrect", ~right, RED)):
        values = entropies[chosen]
        edges = np.linspace(0, end, 25)
        bars.hist(values, edges, density=True, color=colour, alpha=0.3, label=name)
        bars.axvline(values.mean(), color=colour, linewidth=0.8)
    order = np.argsort(entropies, kind="stable")
    for tenth in filter(len, np.array_split(order, 10)):
        ax.plot(
            entropies[tenth].mean(),
            right[tenth].mean(),
            "o",
            color=BLACK,
            markersize=3,
            label="share correct, tenths of the answers",
        )
    if fit := significance.logistic(entropies, right):
        intercept, slope, _ = fit
        x = np.linspace(0, end, 200)
        chances = 1 / (1 + np.exp(-(intercept + slope * x)))
        ax.plot(x, chances, color=BLACK, label="logistic regression")
    bars.set_ylabel("density of answers (bars)")
    ax.set(
        title=f"{TASKS[run.task][0]}\n{textwrap.fill(str(run.setup), 28)}",
        ylabel="share correct (line, dots)",
        xlabel=NATS,
        xlim=(-0.02 * end, 1.02 * end),  # the edges of the outermost bars are seen
        ylim=(-0.1, 1.1),
    )


FIGURES = {
    "heads": (
        heads_figure,
        "score against the number of masked heads, retrieval heads (solid) "
        "and random heads (dashed, with the range of the draws)",
    ),
    "alpha": (alpha_figure, "score against α of DeCoRe static"),
    "entropy": (entropy_figure, "base entropy per token of each method"),
    "correctness": (
        correctness_figure,
        "base entropy of correct and incorrect answers, with a logistic regression",
    ),
}


# Head files


def head_maps(files):
    """Figure of the retrieval scores of several models by layer and head. files: {path: scores}"""

    def draw(ax, path, scores):
        table = np.zeros(np.add(max(scores), 1))  # [L, H]
        table[tuple(np.transpose([*scores]))] = [*scores.values()]
        ax.imshow(table, norm=PowerNorm(0.5, 0, 1), aspect="auto", origin="lower")
        ax.set(title=path.stem, xlabel="head", ylabel="layer")

    note = "retrieval score of every head, layer 0 at the bottom"
    figure = figure_of(files.items(), draw, [], note, height=2.3)
    axes = figure.axes[: len(files)]
    label = "retrieval score (colour by its square root)"
    figure.colorbar(axes[-1].images[0], ax=axes, shrink=0.5, aspect=30, label=label)
    return figure
