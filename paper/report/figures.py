"""The paper's figures of stored runs (report DIR --plots OUT) and of head files (report heads).

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and dashes
repeat the information. The foot of each figure says which runs it shows."""

import itertools
import textwrap
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paper import printed
from paper.printed import TASKS
from paper.report import tables
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
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #7A5C00 #56B4E9 #E69F00 #882255 #7F7F7F".split()
BARS = "error bars: the paired 95 % interval of the difference to greedy, around the value"


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
                    name = f"{kind}-{title}-{group.lower()}".replace(",", "").replace(" ", "-")
                    path = folder / f"{name}.png"
                    figure.savefig(path)
                    pictures.append((path, f"{title}: {caption}"))
    return pictures


def figure_of(panels, draw, runs, *notes, height=2.1):
    """A figure of the page's width; None without panels. `draw(axes, *panel)` draws a panel.

    The foot says which runs it shows. `draw` may add to them. height: of a row of panels, in
    inches."""
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(7.6, rows * height + 0.9), layout="constrained")
    handles = {}
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for ax, panel in itertools.zip_longest(axes, panels):
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


def curve_figure(frame, field):
    """Score against "num_heads" or "alpha": a panel per task with a line per setup that has several
    values of it, random heads with any number of values, and a horizontal line for greedy
    decoding."""
    lines = frame[frame["headline"]].sort_values("task", kind="stable")
    if field == "num_heads":
        lines = lines[lines["alpha"].isna()]
    swept = lines.dropna(subset=field)
    names = [str(replace(run.setup, **{field: None})) for run in swept["run"]]
    looks = zip(itertools.cycle(COLOURS), itertools.cycle("ovDs^P<"))
    styles = {
        name: {"color": colour, "marker": marker, "label": name}
        for name, (colour, marker) in zip(dict.fromkeys(names), looks)
    }
    panels, runs = defaultdict(list), []
    for (task, name), curve in swept.groupby(["task", names], sort=False, observed=True):
        if curve[field].nunique() > 1 or curve["random_heads"].notna().all():
            panels[task].append((curve, styles[name]))

    def draw(ax, task, curves):
        draw_curves(ax, field, curves)
        greedy = lines[(lines["method"] == "greedy") & (lines["task"] == task)]
        for curve in [greedy, *(curve for curve, _ in curves)]:
            runs.extend(curve["run"])
        for setup, value in zip(greedy["setup"], greedy["value"]):
            ax.axhline(value, linestyle=":", linewidth=1, color="#000000", label=setup)
        xlabel = {"num_heads": "heads masked, N", "alpha": "α"}[field]
        ax.set(title=TASKS[task][0], xlabel=xlabel, ylabel=printed.headline(task)[1])
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=field == "num_heads"))

    panels = [
        (task, curves)
        for task, curves in panels.items()
        if any(curve[field].nunique() > 1 for curve, _ in curves)
    ]
    return figure_of(panels, draw, runs, BARS)


def draw_curves(ax, field, curves):
    """Means over the draws with error bars; the range of random heads; the paper's points in the
    same style."""
    papers = {}
    width = np.ptp(np.concatenate([curve[field] for curve, _ in curves]).astype(float))
    for number, (curve, style) in enumerate(curves):
        run = curve["run"].iloc[0]
        papers.setdefault(printed.method_of(run.setup), (run, style))
        points = []
        for x, draws in curve.groupby(field):
            mean, low, high = draws[["value", "low", "high"]].mean()
            if versus := tables.versus_of(draws):
                low, high = mean - versus.difference + np.array(versus[2:4])
            points.append((x, mean, mean - low, high - mean, *draws["value"].agg(["min", "max"])))
        x, mean, below, above, least, most = np.transpose(points).astype(float)
        x += 0.012 * width * (number - (len(curves) - 1) / 2)  # error bars lie side by side
        if run.setup.random_heads:
            ax.fill_between(x, least, most, color=style["color"], alpha=0.13)
            style = style | {"linestyle": "--", "markerfacecolor": "white"}
        ax.plot(x, mean, markersize=4, linewidth=1.3, **style)
        ax.errorbar(x, mean, (below, above), fmt="none", color=style["color"], elinewidth=0.7)
    for method, (run, style) in papers.items():
        if points := printed.points(field, run.paper_model, run.task, method):
            style = style | {"label": f"the paper: {METHODS.get(method, method)}"}
            ax.plot(*np.transpose(points), ":", markersize=3, linewidth=0.8, alpha=0.6, **style)


FIGURES = {
    "heads": (
        partial(curve_figure, field="num_heads"),
        "score against the number of masked heads, retrieval heads (solid) "
        "and random heads (dashed, with the range of the draws)",
    ),
    "alpha": (partial(curve_figure, field="alpha"), "score against α"),
}


# Head files


def head_maps(files):
    """Figure of the retrieval scores of several models by layer and head. files: {path: scores}"""

    def draw(ax, path, scores):
        table = np.zeros(np.add(max(scores), 1))  # [L, H]
        table[tuple(np.transpose([*scores]))] = [*scores.values()]
        ax.imshow(table, norm=PowerNorm(0.5, 0, 1), aspect="auto", origin="lower")
        ax.set(title=path.stem, xlabel="head", ylabel="layer")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))

    note = "retrieval score of every head, layer 0 at the bottom"
    figure = figure_of(files.items(), draw, [], note, height=2.3)
    axes = figure.axes[: len(files)]
    label = "retrieval score (colour by its square root)"
    figure.colorbar(axes[-1].images[0], ax=axes, shrink=0.5, aspect=30, label=label)
    return figure
