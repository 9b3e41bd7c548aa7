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
from scipy.stats import gaussian_kde

from report import published, significance, tables
from report.stored import NOT_FRACTIONS, base_entropies, greedy_mean, group, of_typical, typical

WIDTH, PANEL = 7.6, 2.1                         # inches across the page and per row of panels
matplotlib.rcParams.update({
    "font.size": 6.5, "axes.titlesize": 8, "axes.labelsize": 6.5, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 8, "legend.frameon": False, "axes.titlelocation": "left", "xaxis.labellocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 150})
STYLE = {                                       # method → colour, marker
    "greedy": ("#000000", "s"), "masked": ("#0072B2", "v"), "decore-static": ("#009E73", "D"),
    "decore-entropy": ("#D55E00", "o"), "decore-static-lite": ("#66A182", "d"),
    "decore-entropy-lite": ("#F0E442", "h"), "iti": ("#882255", "p"), "cad": ("#CC79A7", "^"), "cd": ("#7A5C00", "<"),
    "dola-low": ("#56B4E9", ">"), "dola-high": ("#E69F00", "P"), "ad": ("#7F7F7F", "X")}
CYCLE = ["#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#7A5C00", "#882255"]
MARKERS = "ovDs^P<>X*"
DASHES = {None: "-", "uniform": "--", "published": "-."}        # retrieval heads, samplers of random heads


def draw_all(runs, folder):
    """Writes every figure that the runs have data for. Returns [(path, caption)]."""
    folder, pictures = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    for title, all_setups in group(runs)[0].items():
        masks = sorted({setup.mask for setup in all_setups if setup.mask}) or [None]    # each has its own figures
        for mask, (name, group_tasks) in itertools.product(masks, published.GROUPS.items()):
            setups = {setup: by_task for setup, by_task in all_setups.items() if setup.mask in (None, mask)}
            tasks = [task for task in published.tasks_of(setups) if task in group_tasks]
            for kind, (draw, caption) in FIGURES.items():
                if figure := draw(setups, tasks):
                    parts = dict.fromkeys([kind, title, name.lower(), *["query"] * (mask == "query")])
                    path = folder / ("-".join(parts).replace(", ", "-").replace(" ", "-") + ".png")
                    figure.savefig(path)
                    pictures.append((path, f"{title}{', query mask' * (mask == 'query')}: {caption}"))
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


def finish(figure, setups, tasks, *notes):
    """Adds the legend of all labelled lines, and a foot that says which runs the figure shows."""
    runs = [run for by_task in setups.values() for task in tasks for run in by_task.get(task, [])]

    def setting(name, length=None):
        values = sorted({str(run.settings.get(name) or "none").split("/")[-1][:length] for run in runs})
        return f"{name} {', '.join(values[:3])}" + f" and {len(values) - 3} more" * (len(values) > 3)

    handles = {label: line for ax in figure.axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles, loc="outside upper center",
                      ncols=2 if max(map(len, handles)) > 36 else 3)
    n = ", ".join(f"{task} {tables.low_to_high([len(run.lines) for run in runs if run.task == task])}"
                  for task in tasks)
    seeds = ", ".join(map(str, sorted({run.settings["seed"] for run in runs if run.setup.random_heads})))
    add_foot(figure, setting("model"), f"n: {n}", f"seeds of random heads: {seeds or 'none'}", setting("mask"),
             setting("dtype"), setting("date"), setting("commit", 8), *notes)


def add_foot(figure, *notes):
    lines = textwrap.wrap(" · ".join(notes), 150, break_on_hyphens=False)
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=6.5, color="#444444")


def label_of(setup):
    return str(setup._replace(mask=None))       # all of a figure have the same mask


# Scores against N and against α

def sweep_figure(field, setups, tasks):
    """Score against "num_heads" or "alpha": a panel per task, a line per setup.

    Against N: retrieval heads, and random heads with the range of their draws. Against α: DeCoRe static, a line per
    N."""
    usual, by_alpha = typical(setups), field == "alpha"
    levels = {setup: setups[setup] for setup in usual               # drawn as horizontal lines
              if setup.method == "greedy" or setup.method == "decore-entropy" and by_alpha}
    static_alpha = next((setup.alpha for setup in usual if setup.method == "decore-static"), None)
    options = {"", *(setup.options for setup in usual)}

    def is_plotted(setup):
        if setup.options not in options:
            return False
        if by_alpha:
            return setup.method == "decore-static" and not setup.random_heads
        return setup.num_heads and setup.alpha in (None, static_alpha)

    plotted = {setup: by_task for setup, by_task in setups.items() if is_plotted(setup)}
    notes = () if by_alpha else ("band and dots: range and single draws of random heads",
                                 "r: Pearson, over N; masked models with N = 0 (greedy), DeCoRe without")
    panels = tables.curves(plotted, tasks, field)
    if not panels:
        return None
    numbers = sorted({line.num_heads or 0 for lines in panels.values() for line in lines})
    figure, axes = grid(len(panels))
    for ax, (task, lines) in zip(axes, panels.items(), strict=True):
        title, metric, labels = published.TASKS[task]
        greedy = greedy_mean(setups, task, metric)
        label = "α" if by_alpha else "heads masked, N"
        for line, points in lines.items():
            colour, marker = STYLE[line.method]
            if by_alpha:
                i = numbers.index(line.num_heads)
                colour, marker = CYCLE[i % len(CYCLE)], MARKERS[i % len(MARKERS)]
                points |= {0.0: [greedy]} if greedy is not None else {}     # at α = 0 nothing is contrasted
            elif (r := tables.correlation(line.method, points, greedy)) is not None:
                name = label_of(line).replace("random heads as published", "published draws")
                label += f"\nr {name}: {r:+.2f}".replace("-", "−")
            draw_line(ax, line, points, colour, marker)
            paper = published.points(field, tables.model_of(setups), task, published.method_of(line))
            if paper:
                ax.plot(*zip(*paper, strict=True), DASHES[line.random_heads], color="#999999", marker=marker,
                        markersize=3, linewidth=0.8, markerfacecolor="white", label="the paper's values")
        for setup, by_task in levels.items():
            if task in by_task and (mean := by_task[task][0].means.get(metric)) is not None:
                ax.axhline(mean, linestyle=":" if setup.method == "greedy" else "-.", linewidth=1,
                           color=STYLE[setup.method][0], label=label_of(setup))
        ax.set_title(title)
        ax.set(xlabel=label, ylabel=labels[metric] or "%")
        if metric not in NOT_FRACTIONS:
            ax.set_ylim(-4, 104)                # the whole range, so that a small change looks small
    finish(figure, levels | plotted, panels, *notes)
    return figure


def draw_line(ax, line, points, colour, marker):
    """points: {N or α: [score of each draw]}"""
    numbers = sorted(points)
    if line.random_heads:
        ax.fill_between(numbers, [min(points[n]) for n in numbers], [max(points[n]) for n in numbers], color=colour,
                        alpha=0.13, linewidth=0)
        for n in numbers:
            ax.plot([n] * len(points[n]), points[n], ".", color=colour, markersize=2, alpha=0.6)
    ax.plot(numbers, [np.mean(points[n]) for n in numbers], DASHES[line.random_heads], color=colour, marker=marker,
            markersize=4, linewidth=1.3, markerfacecolor="white" if line.random_heads else colour, label=label_of(line))


# Entropies

def entropy_figure(setups, tasks):
    """Base entropy per token of each method. Tests: DeCoRe's below greedy's, ITI's and DoLa's."""
    methods, panels = typical(setups), of_typical(setups, tasks, base_entropies)
    if not panels:
        return None
    figure, axes = grid(len(panels), height=0.65 + 0.24 * len(methods), sharey=True)
    for ax, (task, entropies) in zip(axes, panels.items(), strict=True):
        highest = max(np.percentile(values, 99.5) for values in entropies.values()) or 1e-3
        label = "base entropy, nats per token"
        for setup, values in entropies.items():
            draw_density(ax, values, len(methods) - 1 - methods.index(setup), STYLE[setup.method][0], highest)
        decore = next((values for setup, values in entropies.items() if setup.method == "decore-entropy"), ())
        for rival in (setup for setup in entropies if setup.method in tables.RIVALS):
            if test := significance.t_test(decore, entropies[rival], "less"):
                label += f"\nDeCoRe < {rival}: {tables.p_text(test.pvalue)}"
        ax.set_yticks(range(len(methods)), map(label_of, reversed(methods)))
        ax.set(xlim=(0, highest * 1.02), xlabel=label)
        ax.set_title(published.TASKS[task][0])
    finish(figure, {setup: setups[setup] for setup in methods}, panels, "line: mean; box: quartiles; p: Welch's "
           "t-test, one-sided, DeCoRe entropy's below the others'; drawn up to the 99.5th percentile")
    return figure


def draw_density(ax, values, y, colour, highest):
    """A density above its base line, with mean and quartiles."""
    if np.std(values) > 1e-9:
        x = np.linspace(0, highest, 300)
        density = gaussian_kde(values, 0.25)(x)
        ax.fill_between(x, y, y + 0.75 * density / density.max(), color=colour, alpha=0.35, linewidth=0)
    ax.plot(np.percentile(values, [25, 75]), [y, y], color=colour, linewidth=4, solid_capstyle="butt")
    ax.plot([values.mean()] * 2, [y - 0.12, y + 0.6], color=colour, linewidth=1.5)


def correctness_figure(setups, tasks):
    """Entropies of correct and incorrect answers: densities, and the chance of a correct answer as entropy grows."""
    dola = "dola-low" if any(setup.method == "dola-low" for setup in setups) else "dola-high"     # the paper names none
    names = ("greedy", dola, "decore-entropy")
    methods = sorted((setup for setup in typical(setups) if setup.method in names),
                     key=lambda setup: names.index(setup.method))
    panels = of_typical({setup: setups[setup] for setup in methods}, tasks, tables.entropies_and_verdicts)
    if not panels:
        return None
    figure, axes = grid(2 * len(methods) * len(panels), len(methods), 1.5)
    axes = np.reshape(axes, (len(panels), 2, len(methods)))
    for (task, pairs), rows in zip(panels.items(), axes, strict=True):
        for setup, (above, below) in zip(methods, rows.T, strict=True):
            if setup in pairs:
                draw_correctness(above, below, *pairs[setup])
                above.set_title(f"{published.TASKS[task][0]}\n{label_of(setup)}")
            else:
                above.set_axis_off()
                below.set_axis_off()
    finish(figure, {setup: setups[setup] for setup in methods}, panels, "R²: McFadden's pseudo-R², no penalty")
    return figure


def draw_correctness(above, below, entropies, right):
    """Histograms of correct and incorrect answers above, single answers and a logistic regression below."""
    fit, end = significance.logistic(entropies, right), max(entropies.max(), 1e-6)
    x, bins = np.linspace(0, end, 200), np.linspace(0, end, 25)
    if fit:
        below.plot(x, 1 / (1 + np.exp(-(fit.intercept + fit.slope * x))), color="black", linewidth=1.2,
                   label="logistic regression")
    for tenth in np.array_split(np.argsort(entropies, kind="stable"), 10):
        if len(tenth):
            below.plot(entropies[tenth].mean(), right[tenth].mean(), "o", color="black", markersize=3,
                       label="share correct, tenths of the examples")
    for values, name, colour, dash, y in ((entropies[right], "correct", "#0072B2", "-", 1.04),
                                          (entropies[~right], "incorrect", "#D55E00", "--", -0.04)):
        above.hist(values, bins, density=True, histtype="stepfilled", facecolor=f"{colour}33", edgecolor=colour,
                   linestyle=dash, linewidth=1.2)
        above.axvline(values.mean(), color=colour, linestyle=dash, linewidth=0.8, label=name)
        below.plot(values, np.full(len(values), y), "|", color=colour, markersize=4, alpha=0.35)
    above.set(xlim=(0, end), ylabel="density")
    below.set(xlim=(0, end), ylim=(-0.1, 1.1), ylabel="correct",
              xlabel="base entropy, nats per token" + (f"\nR² = {fit.pseudo_r2:.3f}" if fit else ""))


FIGURES = {
    "heads": (partial(sweep_figure, "num_heads"), "score against the number of masked heads, retrieval heads (solid) "
                                                  "and random heads (dashed, with the range of the draws)"),
    "alpha": (partial(sweep_figure, "alpha"), "score against α of DeCoRe static"),
    "entropy": (entropy_figure, "base entropy per token of each method"),
    "correctness": (correctness_figure, "base entropy of correct and incorrect answers, with a logistic regression")}
