"""The paper's figures of stored runs (evaluate.py report DIR --plots OUT) and of head files (report heads --plots OUT).

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and dashes repeat the information.
The foot of each figure says which runs it shows."""

import itertools
import textwrap
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from report import published, tables
from report.frame import typical
from report.published import HEADLINES, NAMES
from report.stored import METHODS, base_entropies

WIDTH, PANEL = 7.6, 2.1                         # inches across the page and per row of panels
matplotlib.rcParams.update({
    "font.size": 6.5, "axes.titlesize": 8, "axes.labelsize": 6.5, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 8, "legend.frameon": False, "axes.titlelocation": "left", "xaxis.labellocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 150})
COLOURS = ["#000000", "#0072B2", "#009E73", "#D55E00", "#66A182", "#F0E442", "#882255", "#7A5C00",
           "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F"]          # of METHODS
COLOUR = dict(zip(METHODS, COLOURS, strict=True))
CYCLE, MARKERS = ["#0072B2", "#009E73", *COLOURS[7:]], "ovDs^P<>X*"     # of the lines of a figure
LEVELS = {None: ":", "output": "-.", "query": "--"}            # greedy, ways of masking


def draw_all(frame, folder):
    """Writes every figure that the runs have data for. Returns their paths."""
    pictures = []
    folder.mkdir(parents=True, exist_ok=True)
    for (title, same), group, kind in itertools.product(frame.groupby("title"), published.GROUPS, FIGURES):
        shown = same[same["task"].isin(published.GROUPS[group])]
        if len(shown) and (figure := FIGURES[kind](shown)):
            name = "-".join(dict.fromkeys([kind, title, group.lower()]))
            pictures.append(folder / f"{name.replace(', ', '-').replace(' ', '-')}.png")
            figure.savefig(pictures[-1])
    return pictures


def grid(panels, height=PANEL, **options):
    """A figure of the page's width with this many panels. Returns (figure, axes)."""
    columns = min(3, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(WIDTH, rows * height + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(4))
    for ax in axes[panels:]:
        ax.set_axis_off()
    return figure, axes[:panels]


def finish(figure, runs, *notes):
    """The figure with a legend of all labelled lines, and a foot that says which runs it shows."""
    handles = {label: line for ax in figure.axes
               for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if handles:
        columns = 2 if max(map(len, handles)) > 36 else 3
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns)
        figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(handles) // columns))
    lengths = {task: [len(run.lines) for run in runs if run.task == task] for task in NAMES}
    facts = {"model": [Path(run.header["model"]).name for run in runs],
             "n": [f"{task} {tables.low_to_high(numbers)}" for task, numbers in lengths.items() if numbers],
             "seeds of random heads": [run.header.get("seed") for run in runs if run.setup.random_heads],
             "mask": [run.setup.mask for run in runs if run.setup.mask],
             "dtype": [run.header.get("dtype") for run in runs],
             "commit": [str(run.header.get("commit"))[:8] for run in runs]}
    foot = [f"{name}: {', '.join(map(str, dict.fromkeys(values)))}" for name, values in facts.items() if values]
    foot = textwrap.fill(" · ".join([*foot, *notes]), 150, break_on_hyphens=False)
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=6.5, color="#444444")
    return figure


def sweep_figure(field, frame):
    """Score against "num_heads" or "alpha": a panel per task, a line per setup.

    Against N: retrieval heads, and random heads with the range of their draws. Against α: DeCoRe static."""
    by_alpha, usual = field == "alpha", typical(frame)
    methods = ["decore-static", "greedy"] if by_alpha else usual["method"]
    free = ["num_heads", "alpha" if by_alpha else "random_heads"]
    kinds = {run.setup.text(*free) for run in usual[usual["method"].isin(methods)]["run"]}
    swept = frame[[run.setup.text(*free) in kinds for run in frame["run"]]]
    panels = {task: curves for task in NAMES if (curves := tables.curves(swept, task, field))}
    if not panels:
        return None
    names = [*dict.fromkeys(name for curves in panels.values() for name, *_ in curves)]
    figure, axes = grid(len(panels), height=PANEL + 0.12 * len(names) * (not by_alpha))
    drawn = []
    for ax, (task, curves) in zip(axes, panels.items(), strict=True):
        label = "α" if by_alpha else "heads masked, N"
        levels = usual[(usual["task"] == task) & usual["headline"]]
        greedy = levels[levels["method"] == "greedy"]["value"].tolist()
        for name, curve, r in curves:
            i, random = names.index(name), curve["run"].iloc[0].setup.random_heads
            draws, colour = curve.groupby(field)["value"], CYCLE[i % len(CYCLE)]
            means = draws.mean()
            if by_alpha and greedy:
                means.loc[0.0] = greedy[0]                          # at α = 0 nothing is contrasted
            if not by_alpha and not np.isnan(r):
                label += f"\nr {name}: {r:+.2f}".replace("random heads as published", "published draws")
            ax.plot(means.sort_index(), "--" if random else "-", label=name, color=colour, linewidth=1.3,
                    marker=MARKERS[i % len(MARKERS)], markersize=4, markerfacecolor="white" if random else colour)
            if random:
                ax.fill_between(means.index, draws.min(), draws.max(), color=colour, alpha=0.13, linewidth=0)
                ax.plot(curve[field], curve["value"], ".", color=colour, markersize=2, alpha=0.6)
        levels = levels[levels["method"].isin(["greedy", "decore-entropy"] if by_alpha else ["greedy"])]
        for run, value in zip(levels["run"], levels["value"], strict=True):
            ax.axhline(value, linestyle=LEVELS[run.setup.mask], linewidth=1, color=COLOUR[run.setup.method],
                       label=str(run.setup))
        drawn += itertools.chain(levels["run"], *(curve["run"] for _, curve, _ in curves))
        ax.set(title=NAMES[task], xlabel=label, ylabel=HEADLINES[task][1])
    notes = () if by_alpha else ("band and dots: range and single draws of random heads",
                                 "r: Pearson, over N; masked models with N = 0 (greedy), DeCoRe without")
    return finish(figure, drawn, *notes)


def entropy_figure(frame):
    """Base entropy per token of each method. Tests: DeCoRe's below greedy's, ITI's and DoLa's."""
    shown = typical(frame[frame["metric"] == "entropy"])
    if shown.empty:
        return None
    panels, setups = shown.groupby("task"), [*shown["setup"].unique()]
    figure, axes = grid(len(panels), height=0.65 + 0.24 * len(setups), sharey=True)
    for ax, (task, same) in zip(axes, panels, strict=True):
        entropies, label = {run: base_entropies(run) for run in same["run"]}, "base entropy, nats per token"
        decore = [values for run, values in entropies.items() if run.setup.method == "decore-entropy"] or [()]
        for run, values in entropies.items():
            violin = ax.violinplot([values], [-setups.index(str(run.setup))], orientation="horizontal", side="high",
                                   widths=1.5, bw_method=0.25, showmeans=True, showextrema=False,
                                   quantiles=[0.25, 0.75])
            for part in (*violin["bodies"], violin["cmeans"], violin["cquantiles"]):
                part.set_color(COLOUR[run.setup.method])
            violin["cquantiles"].set_linewidth(0.6)
            test = tables.t_test(decore[-1], values, "less")
            if test and run.setup.method in tables.RIVALS:
                label += f"\nDeCoRe < {run.setup}: {tables.p_text(test.pvalue)}"
        highest = max(np.percentile(values, 99.5) for values in entropies.values()) or 1e-3
        ax.set_yticks(range(0, -len(setups), -1), setups)
        ax.set(title=NAMES[task], xlabel=label, xlim=(0, highest * 1.02))
    return finish(figure, shown["run"], "density, mean (thick line) and quartiles (thin), up to the 99.5th percentile; "
                  "p: Welch's t-test, one-sided, DeCoRe entropy's below the others'")


FIGURES = {"heads": partial(sweep_figure, "num_heads"), "alpha": partial(sweep_figure, "alpha"),
           "entropy": entropy_figure}


def head_maps(files):
    """Figure of the retrieval scores of several models by layer and head. files: {path: scores}"""
    figure, axes = grid(len(files), height=2.3)
    highest = max(1, *(max(scores.values()) for scores in files.values()))  # by the published rule a score may exceed 1
    for ax, (path, scores) in zip(axes, files.items(), strict=True):
        table = np.zeros(np.add(max(scores), 1))                            # [L, H]
        table[tuple(np.transpose([*scores]))] = [*scores.values()]
        image = ax.imshow(table, norm=PowerNorm(0.5, 0, highest), aspect="auto", origin="lower",
                          interpolation="nearest")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set(title=path.stem, xlabel="head", ylabel="layer")
    figure.colorbar(image, ax=axes, location="right", shrink=0.5, aspect=30,
                    label="retrieval score (colour by its square root)")
    return finish(figure, [], "retrieval score of every head, layer 0 at the bottom")
