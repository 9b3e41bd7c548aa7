"""The paper's figures from stored runs: evaluate.py report DIR --plots OUT.

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and dashes repeat the information.
The foot of each figure says which runs it shows."""

import itertools
import textwrap
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from report import published, significance, tables
from report.stored import METHODS, NOT_FRACTIONS, base_entropies, group, typical

WIDTH, PANEL = 7.6, 2.1                         # inches across the page and per row of panels
matplotlib.rcParams.update({
    "font.size": 6.5, "axes.titlesize": 8, "axes.labelsize": 6.5, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 8, "legend.frameon": False, "axes.titlelocation": "left", "xaxis.labellocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 150})
COLOURS = ["#000000", "#0072B2", "#009E73", "#D55E00", "#66A182", "#F0E442", "#882255", "#7A5C00", "#CC79A7", "#56B4E9",
           "#E69F00", "#7F7F7F"]                # of METHODS
COLOUR = dict(zip(METHODS, COLOURS, strict=True))
CYCLE, MARKERS = ["#0072B2", "#009E73", *COLOURS[7:]], "ovDs^P<>X*"     # of the lines of a figure
DASHES = {None: "-", "uniform": "--", "published": "-."}        # retrieval heads, samplers of random heads
LEVELS = {None: ":", "output": "-.", "query": "--"}            # greedy, ways of masking


def draw_all(runs, folder):
    """Writes every figure that the runs have data for. Returns [(path, caption)]."""
    folder, pictures = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    for title, same in group(runs)[0].items():
        for name, kind in itertools.product(published.GROUPS, FIGURES):
            draw, caption = FIGURES[kind]
            if figure := draw(same, published.GROUPS[name]):
                parts = dict.fromkeys([kind, title, name.lower()])
                path = folder / ("-".join(parts).replace(", ", "-").replace(" ", "-") + ".png")
                figure.savefig(path)
                pictures.append((path, f"{title}: {caption}"))
    return pictures


def grid(panels, columns=3, height=PANEL, **options):
    """A figure of the page's width with this many panels. Returns (figure, axes)."""
    columns = min(columns, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(WIDTH, rows * height + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(4))
    for ax in axes[panels:]:
        ax.set_axis_off()
    return figure, axes[:panels]


def finish(figure, runs, *notes):
    """Adds the legend of all labelled lines, and a foot that says which runs the figure shows."""
    handles = {label: line for ax in figure.axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles, loc="outside upper center",
                      ncols=2 if max(map(len, handles)) > 36 else 3)
    facts = {"model": [Path(run.settings["model"]).name for run in runs],
             "n": [f"{task} {tables.low_to_high([len(run.lines) for run in same])}"
                   for task, same in published.by_task(runs).items()],
             "seeds of random heads": [run.settings.get("seed") for run in runs if run.setup.random_heads],
             "mask": [run.setup.mask for run in runs if run.setup.mask],
             "dtype": [run.settings.get("dtype") for run in runs],
             "commit": [str(run.settings.get("commit"))[:8] for run in runs]}
    add_foot(figure, *(f"{name}: {', '.join(map(str, dict.fromkeys(values)))}" for name, values in facts.items()
                       if values), *notes)


def add_foot(figure, *notes):
    lines = textwrap.wrap(" · ".join(notes), 150, break_on_hyphens=False)
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=6.5, color="#444444")


# Scores against N and against α

def sweep_figure(field, runs, tasks):
    """Score against "num_heads" or "alpha": a panel per task, a line per setup.

    Against N: retrieval heads, and random heads with the range of their draws. Against α: DeCoRe static, a line per
    N."""
    usual, by_alpha = typical(runs), field == "alpha"
    free = {"num_heads": None, "alpha": None} if by_alpha else {"num_heads": None, "random_heads": None}
    kinds = {run.setup._replace(**free) for run in usual
             if run.setup.num_heads is not None and (run.setup.method == "decore-static" or not by_alpha)}
    swept = [run for run in runs if run.setup._replace(**free) in kinds]
    panels = {task: lines for task in tasks if (lines := tables.curves(swept, task, field))}
    if not panels:
        return None
    levels = [run for run in usual                                  # drawn as horizontal lines
              if run.setup.method == "greedy" or run.setup.method == "decore-entropy" and by_alpha]
    lines = itertools.chain(*panels.values())
    styles = [*dict.fromkeys(line._replace(random_heads=None) for line in lines)]
    figure, axes = grid(len(panels))
    for ax, (task, lines) in zip(axes, panels.items(), strict=True):
        title, metric, labels = published.TASKS[task]
        greedy = tables.greedy_mean(runs, task)
        label = "α" if by_alpha else "heads masked, N"
        for line, points in lines.items():
            i = styles.index(line._replace(random_heads=None))
            colour, marker = CYCLE[i % len(CYCLE)], MARKERS[i % len(MARKERS)]
            if by_alpha:
                points |= {0.0: [greedy]} if greedy is not None else {}     # at α = 0 nothing is contrasted
            elif (r := tables.correlation(line.method, points, greedy)) is not None:
                label += f"\nr {line}: {r:+.2f}".replace("random heads as published", "published draws")
            draw_line(ax, line, points, colour, marker)
            paper = published.points(field, runs[0].model, task, published.method_of(line))
            if paper:
                ax.plot(*zip(*paper, strict=True), DASHES[line.random_heads], color="#999999", marker=marker,
                        markersize=3, linewidth=0.8, markerfacecolor="white", label="the paper's values")
        for run in levels:
            if run.task == task and metric in run.means:
                ax.axhline(run.means[metric], linestyle=LEVELS[run.setup.mask], linewidth=1,
                           color=COLOUR[run.setup.method], label=str(run.setup))
        ax.set(title=title, xlabel=label, ylabel=labels[metric] or "%")
        if metric not in NOT_FRACTIONS:
            ax.set_ylim(-4, 104)                # the whole range, so that a small change looks small
    notes = () if by_alpha else ("band and dots: range and single draws of random heads",
                                 "r: Pearson, over N; masked models with N = 0 (greedy), DeCoRe without")
    drawn = [run for run in swept if run.setup._replace(**{field: None}) in panels.get(run.task, ())]
    finish(figure, [run for run in levels if run.task in panels] + drawn, *notes)
    return figure


def draw_line(ax, line, points, colour, marker):
    """points: {N or α: [score of each draw]}"""
    numbers = sorted(points)
    draws = [points[n] for n in numbers]
    ax.plot(numbers, [*map(np.mean, draws)], DASHES[line.random_heads], color=colour, marker=marker, markersize=4,
            linewidth=1.3, markerfacecolor="white" if line.random_heads else colour, label=str(line))
    if line.random_heads:
        ax.fill_between(numbers, [*map(min, draws)], [*map(max, draws)], color=colour, alpha=0.13, linewidth=0)
        for n, values in points.items():
            ax.plot([n] * len(values), values, ".", color=colour, markersize=2, alpha=0.6)


# Entropies

def entropy_figure(runs, tasks):
    """Base entropy per token of each method. Tests: DeCoRe's below greedy's, ITI's and DoLa's."""
    runs = [run for run in typical(runs) if run.task in tasks and len(base_entropies(run))]
    panels, setups = published.by_task(runs), [*dict.fromkeys(run.setup for run in runs)]
    if not panels:
        return None
    figure, axes = grid(len(panels), height=0.65 + 0.24 * len(setups), sharey=True)
    for ax, (task, same) in zip(axes, panels.items(), strict=True):
        entropies = {run.setup: base_entropies(run) for run in same}
        for setup, values in entropies.items():
            violin = ax.violinplot([values], [-setups.index(setup)], orientation="horizontal", side="high", widths=1.5,
                                   bw_method=0.25, showmeans=True, showextrema=False, quantiles=[0.25, 0.75])
            for part in (*violin["bodies"], violin["cmeans"], violin["cquantiles"]):
                part.set_color(COLOUR[setup.method])
            violin["cquantiles"].set_linewidth(0.6)
        decore = next((values for setup, values in entropies.items() if setup.method == "decore-entropy"), ())
        label = "base entropy, nats per token"
        for rival, values in entropies.items():
            if rival.method in tables.RIVALS and (test := significance.t_test(decore, values, "less")):
                label += f"\nDeCoRe < {rival}: {tables.p_text(test.pvalue)}"
        highest = max(np.percentile(values, 99.5) for values in entropies.values()) or 1e-3
        ax.set_yticks(range(0, -len(setups), -1), map(str, setups))
        ax.set(title=published.TASKS[task][0], xlabel=label, xlim=(0, highest * 1.02))
    finish(figure, runs, "density, mean (thick line) and quartiles (thin), up to the 99.5th percentile; p: Welch's "
           "t-test, one-sided, DeCoRe entropy's below the others'")
    return figure


def correctness_figure(runs, tasks):
    """Entropies of correct and incorrect answers: densities, and the chance of a correct answer as entropy grows."""
    dola = "dola-low" if any(run.setup.method == "dola-low" for run in runs) else "dola-high"   # the paper names none
    runs = [run for run in typical(runs) if run.setup.method in ("greedy", dola, "decore-entropy")]
    panels = [(run, *pairs) for same in published.by_task(runs, tasks).values() for run in same
              if (pairs := tables.entropies_and_verdicts(run))]
    if not panels:
        return None
    figure, axes = grid(len(panels))
    for ax, (run, entropies, right) in zip(axes, panels, strict=True):
        fit, end, density = significance.logistic(entropies, right), max(entropies.max(), 1e-6), ax.twinx()
        x, bins = np.linspace(0, end, 200), np.linspace(0, end, 25)
        for values, name, colour, dash in ((entropies[right], "correct", "#0072B2", "-"),
                                           (entropies[~right], "incorrect", "#D55E00", "--")):
            density.hist(values, bins, density=True, histtype="stepfilled", facecolor=f"{colour}33",
                         edgecolor=colour, linestyle=dash, linewidth=0.8)
            density.axvline(values.mean(), color=colour, linestyle=dash, linewidth=0.8, label=name)
        for tenth in np.array_split(np.argsort(entropies, kind="stable"), 10):
            if len(tenth):
                ax.plot(entropies[tenth].mean(), right[tenth].mean(), "o", color="black", markersize=3,
                        label="share correct, tenths of the examples")
        if fit:
            intercept, slope, r2 = fit
            ax.plot(x, 1 / (1 + np.exp(-(intercept + slope * x))), color="black", label="logistic regression")
        ax.set(title=f"{published.TASKS[run.task][0]}\n{textwrap.fill(str(run.setup), 28)}", ylabel="correct",
               xlabel="base entropy, nats per token" + (f"\nR² = {r2:.3f}" if fit else ""), xlim=(0, end),
               ylim=(-0.1, 1.1))
    finish(figure, [run for run, *_ in panels], "right axis: density; vertical lines: means; R²: McFadden's pseudo-R², "
           "no penalty")
    return figure


FIGURES = {
    "heads": (partial(sweep_figure, "num_heads"), "score against the number of masked heads, retrieval heads (solid) "
                                                  "and random heads (dashed, with the range of the draws)"),
    "alpha": (partial(sweep_figure, "alpha"), "score against α of DeCoRe static"),
    "entropy": (entropy_figure, "base entropy per token of each method"),
    "correctness": (correctness_figure, "base entropy of correct and incorrect answers, with a logistic regression")}
