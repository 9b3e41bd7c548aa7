"""The paper's figures of stored runs (report DIR --plots OUT) and of head files (report heads).

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and dashes
repeat the information. The foot of each figure says which runs it shows."""

import itertools
import textwrap
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from paper import numbers
from paper.numbers import TASKS
from paper.report import significance, tables
from paper.report.frame import by_task, headline_values, typical
from paper.report.stored import METHODS, base_entropies

WIDTH, PANEL = 7.6, 2.1  # inches across the page and per row of panels
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
LINES = [BLUE, GREEN, *OTHERS[3:]]
NATS = "base entropy, nats per token"
LEVELS = {None: ":", "output": "-.", "query": "--"}  # greedy, ways of masking


def draw_all(frame, folder):
    """Writes every figure that the runs have data for. Returns [(path, caption)]."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for title, same in frame.groupby("title"):
        for group, tasks in numbers.GROUPS.items():
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


def grid(panels, height=PANEL, **options):
    """A figure of the page's width with this many panels. Returns (figure, axes)."""
    columns = min(3, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(WIDTH, rows * height + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for ax in axes:
        ax.locator_params(axis="x", nbins=4)
    for ax in axes[panels:]:
        ax.set_axis_off()
    return figure, axes[:panels]


def finish(figure, runs, *notes):
    """Adds the legend of all labelled lines, and a foot that says which runs the figure shows."""
    handles = {}
    for ax in figure.axes:
        for line, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles[label] = line
    if handles:
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=2)
        figure.set_figheight(figure.get_figheight() + 0.09 * len(handles))
    foot = textwrap.fill(" · ".join([*facts_of(runs), *notes]), 150, break_on_hyphens=False)
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=6.5, color="#444444")


def facts_of(runs):
    """Texts about the runs, such as "dtype: float32"."""
    facts = {
        "model": [Path(run.header["model"]).name for run in runs],
        "n": [f"{run.task} {len(run.lines):,}" for run in runs],
        "seeds of random heads": [run.header.get("seed") for run in runs if run.setup.random_heads],
        "dtype": [run.header.get("dtype") for run in runs],
        "commit": [str(run.header.get("commit"))[:8] for run in runs],
    }
    texts = []
    for name, values in facts.items():
        if values:
            texts.append(f"{name}: {', '.join(map(str, dict.fromkeys(values)))}")
    return texts


# Scores against N and against α


def heads_figure(frame):
    """Score against N: a panel per task, retrieval heads, and random ones with their range."""
    panels = curves_by_task(frame, typical(frame), "num_heads", "random_heads")
    if not panels:
        return None
    styles = styles_of(panels)
    figure, axes = grid(len(panels))
    drawn = []
    for ax, (task, curves) in zip(axes, panels.items(), strict=True):
        drawn += draw_curves(ax, "num_heads", curves, styles)
        drawn += draw_levels(ax, frame, task, ["greedy"])
        ax.set_xlabel("heads masked, N")
    finish(figure, drawn, "band: range of the draws of random heads")
    return figure


def alpha_figure(frame):
    """Score of DeCoRe static against α: a panel per task, a line per N."""
    usual = typical(frame)
    static = usual[usual["method"] == "decore-static"]
    panels = curves_by_task(frame, static, "alpha", "num_heads")
    if not panels:
        return None
    styles = styles_of(panels)
    figure, axes = grid(len(panels))
    drawn = []
    for ax, (task, curves) in zip(axes, panels.items(), strict=True):
        drawn += draw_curves(ax, "alpha", curves, styles)
        drawn += draw_levels(ax, frame, task, ["greedy", "decore-entropy"])
        ax.set_xlabel("α")
    finish(figure, drawn)
    return figure


def curves_by_task(frame, usual, field, other):
    """Task → curves over the field, of setups that differ from `usual` in two fields at most."""
    free = {field: None, other: None}
    kinds = {replace(run.setup, **free) for run in usual["run"] if run.setup.num_heads is not None}
    swept = frame[[replace(run.setup, **free) in kinds for run in frame["run"]]]
    curves = {task: tables.curves(swept, task, field) for task in TASKS}
    return {task: of_task for task, of_task in curves.items() if of_task}


def styles_of(panels):
    """Name of a curve → its colour and marker, the same in all panels."""
    free = itertools.cycle(zip(LINES, "ovDs^P<", strict=True))
    styles = {}
    for curves in panels.values():
        for name, _ in curves:
            if name not in styles:
                colour, marker = next(free)
                styles[name] = {"color": colour, "marker": marker}
    return styles


def draw_curves(ax, field, curves, styles):
    """Means over the draws; the range of random heads; the paper's points. Returns the runs."""
    papers = {}
    runs = []
    for name, curve in curves:
        runs += list(curve["run"])
        run = curve["run"].iloc[0]
        style = styles[name]
        papers.setdefault(numbers.method_of(run.setup), (run, style))
        draws = curve.groupby(field)["value"]
        line = {"markersize": 4, "linewidth": 1.3, "label": name}
        if run.setup.random_heads:
            x = list(draws.groups)
            ax.fill_between(x, draws.min(), draws.max(), color=style["color"], alpha=0.13)
            line |= {"linestyle": "--", "markerfacecolor": "white"}
        ax.plot(draws.mean(), **style, **line)
    for method, (run, style) in papers.items():
        if points := numbers.points(field, run.paper_model, run.task, method):
            x, y = zip(*points, strict=True)
            label = f"the paper: {METHODS.get(method, method)}"
            ax.plot(x, y, ":", markersize=3, linewidth=0.8, alpha=0.6, label=label, **style)
    return runs


def draw_levels(ax, frame, task, methods):
    """Title, and horizontal lines at the scores of these methods. Returns their runs."""
    ax.set(title=TASKS[task][0], ylabel=numbers.headline(task)[1])
    levels = headline_values(typical(frame), task)
    levels = levels[levels["method"].isin(methods)]
    for run, value in zip(levels["run"], levels["value"], strict=True):
        dash = LEVELS[run.setup.mask]
        colour = COLOUR[run.setup.method]
        ax.axhline(value, linestyle=dash, linewidth=1, color=colour, label=str(run.setup))
    return list(levels["run"])


# Entropies


def entropy_figure(frame):
    """Base entropy per token of each method."""
    shown = typical(frame[frame["metric"] == "entropy"])
    setups = list(shown["setup"].unique())
    panels = by_task(shown)
    if not panels:
        return None
    figure, axes = grid(len(panels), height=0.65 + 0.24 * len(setups), sharey=True)
    for ax, (task, same) in zip(axes, panels, strict=True):
        for run in same["run"]:
            place = -setups.index(str(run.setup))
            draw_violin(ax, base_entropies(run), place, COLOUR[run.setup.method])
        ax.set_yticks(range(0, -len(setups), -1), setups)
        ax.set(title=TASKS[task][0], xlabel=NATS)
    finish(figure, shown["run"], "density and mean")
    return figure


def draw_violin(ax, values, place, colour):
    violin = ax.violinplot(
        [values],
        [place],
        orientation="horizontal",
        side="high",
        widths=1.5,
        bw_method=0.25,
        showmeans=True,
        showextrema=False,
    )
    for part in (*violin["bodies"], violin["cmeans"]):
        part.set_color(colour)


def correctness_figure(frame):
    """Entropies of correct and incorrect answers, and the chance of a correct answer."""
    shown = typical(frame[frame["metric"] == "entropy"])
    shown = shown[shown["method"].isin(["greedy", "dola-low", "decore-entropy"])]
    panels = []
    for _, same in by_task(shown):
        for run in same["run"]:
            if answers := tables.judged_answers(run):
                panels.append((run, *answers))
    if not panels:
        return None
    figure, axes = grid(len(panels))
    for ax, (run, entropies, right) in zip(axes, panels, strict=True):
        end = max(entropies.max(), 1e-6)
        draw_densities(ax.twinx(), entropies, right, np.linspace(0, end, 25))
        draw_chances(ax, entropies, right, np.linspace(0, end, 200))
        ax.set(
            title=f"{TASKS[run.task][0]}\n{textwrap.fill(str(run.setup), 28)}",
            ylabel="share correct (line, dots)",
            xlabel=NATS,
            xlim=(-0.02 * end, 1.02 * end),  # the edges of the outermost bars are seen
            ylim=(-0.1, 1.1),
        )
    finish(figure, [run for run, *_ in panels], "vertical lines: means")
    return figure


def draw_densities(ax, entropies, right, bins):
    """Bars and means of the entropies of correct and of incorrect answers."""
    groups = {"correct": (entropies[right], BLUE), "incorrect": (entropies[~right], RED)}
    for name, (values, colour) in groups.items():
        ax.hist(values, bins, density=True, color=colour, alpha=0.3, label=name)
        ax.axvline(values.mean(), color=colour, linewidth=0.8)
    ax.set_ylabel("density of answers (bars)")


def draw_chances(ax, entropies, right, x):
    """Share of correct answers by tenths of the answers, and a logistic regression."""
    order = np.argsort(entropies, kind="stable")
    for tenth in filter(len, np.array_split(order, 10)):
        point = entropies[tenth].mean(), right[tenth].mean()
        ax.plot(
            *point, "o", color=BLACK, markersize=3, label="share correct, tenths of the answers"
        )
    if fit := significance.logistic(entropies, right):
        intercept, slope, _ = fit
        chances = 1 / (1 + np.exp(-(intercept + slope * x)))
        ax.plot(x, chances, color=BLACK, label="logistic regression")


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
    figure, axes = grid(len(files), height=2.3)
    for ax, (path, scores) in zip(axes, files.items(), strict=True):
        table = np.zeros(np.add(max(scores), 1))  # [L, H]
        table[tuple(np.transpose([*scores]))] = [*scores.values()]
        image = ax.imshow(table, norm=PowerNorm(0.5, 0, 1), aspect="auto", origin="lower")
        ax.set(title=path.stem, xlabel="head", ylabel="layer")
    label = "retrieval score (colour by its square root)"
    figure.colorbar(image, ax=axes, shrink=0.5, aspect=30, label=label)
    finish(figure, [], "retrieval score of every head, layer 0 at the bottom")
    return figure
