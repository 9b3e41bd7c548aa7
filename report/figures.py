"""The paper's figures, drawn from stored runs: evaluate.py report DIR --plots OUT.

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and dashes carry the same
information. The foot of each figure says which runs it shows."""

import datetime
import itertools
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter
from scipy.stats import gaussian_kde

from report import published, significance, tables
from report.stored import base_entropies, grouped, mean_of, scale, typical

WIDTH, PANEL, DPI = 7.6, 2.1, 150               # inches across the page and per row of panels; dots per inch
STYLE = {                                       # method → colour, marker
    "greedy": ("#000000", "s"), "masked": ("#0072B2", "v"), "decore-static": ("#009E73", "D"),
    "decore-entropy": ("#D55E00", "o"), "decore-static-lite": ("#66A182", "d"),
    "decore-entropy-lite": ("#F0E442", "h"), "iti": ("#882255", "p"), "cad": ("#CC79A7", "^"), "cd": ("#7A5C00", "<"),
    "dola-low": ("#56B4E9", ">"), "dola-high": ("#E69F00", "P"), "ad": ("#7F7F7F", "X")}
CYCLE = ["#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#7A5C00", "#882255"]
MARKERS = "ovDs^P<>X*"
DASHES = {None: "-", "uniform": "--", "published": "-."}        # retrieval heads, samplers of random heads
SMALL, TINY = 8, 6.5                            # points


def draw_all(runs, folder):
    """Writes every figure that the runs give. Returns [(path, caption)]."""
    folder, pictures = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    for title, every in grouped(runs)[0].items():
        masks = sorted({setup.mask for setup in every if setup.mask}) or [None]     # each in figures of its own
        for mask, (group, about) in itertools.product(masks, published.GROUPS.items()):
            setups = {setup: by_task for setup, by_task in every.items() if setup.mask in (None, mask)}
            tasks = [task for task in published.tasks_of(setups) if task in about]
            for kind, draw in FIGURES.items() if tasks else ():
                if picture := draw(setups, tasks):
                    figure, caption = picture
                    parts = dict.fromkeys([kind, title, group.lower(), *["query"] * (mask == "query")])
                    path = folder / ("-".join(parts).replace(", ", "-").replace(" ", "-") + ".png")
                    caption = f"{title}{', query mask' * (mask == 'query')}: {caption}"
                    figure.savefig(path, dpi=DPI, metadata={"Description": caption})
                    pictures.append((path, caption))
    return pictures


def grid(panels, columns=3, height=PANEL, **options):
    """A figure of the page's width with this many panels. Returns (figure, axes)."""
    columns = min(columns, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(WIDTH, rows * height + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for ax in axes:
        ax.tick_params(labelsize=SMALL - 1)
        ax.spines[["top", "right"]].set_visible(False)
        ax.xaxis.set_major_locator(MaxNLocator(4))
    for ax in axes[panels:]:
        ax.set_axis_off()
    return figure, axes[:panels]


def finish(figure, runs, *notes):
    """Adds the legend of all labelled lines, and at the foot from which runs the figure was made."""
    def every(name, end=None):
        values = sorted({str(run.settings.get(name) or "none").split("/")[-1][:end] for run in runs})
        return f"{name} {', '.join(values[:3])}" + f" and {len(values) - 3} more" * (len(values) > 3)

    handles = {label: line for ax in figure.axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles, loc="outside upper center", fontsize=SMALL, frameon=False,
                      ncols=2 if max(map(len, handles)) > 36 else 3)
    counts = {run.task: [] for run in runs}
    for run in runs:
        counts[run.task].append(len(run.lines))
    n = ", ".join(f"{task} {tables.span(numbers)}" for task, numbers in counts.items())
    seeds = ", ".join(map(str, sorted({run.settings["seed"] for run in runs if run.setup.random})))
    foot(figure, every("model"), f"n: {n}", f"seeds of random heads: {seeds or 'none'}", every("mask"), every("dtype"),
         every("date"), every("commit", 8), *notes)


def foot(figure, *notes):
    lines = textwrap.wrap(" · ".join([*notes, f"drawn {datetime.date.today()}"]), 150, break_on_hyphens=False)
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=TINY, color="#444444")


def runs_of(setups, tasks, keep):
    return [run for setup, by_task in setups.items() if keep(setup) for task in tasks for run in by_task.get(task, [])]


def name_of(setup):
    return str(setup._replace(mask=None))       # which is the same in a whole figure


# Scores against N and against α

def heads_figure(setups, tasks):
    """Score against N: retrieval heads, and random heads with the range of their draws."""
    alpha = next((setup.alpha for setup in typical(setups) if setup.method == "decore-static"), None)
    options = {"", *(setup.options for setup in typical(setups))}

    def is_shown(line):
        return line.alpha in (None, alpha) and line.options in options

    panels = {}
    for task in tasks:
        lines, start = tables.curves(setups, task, published.headline(task)[0])
        lines = {line: points for line, points in lines.items() if len(points) > 1 and is_shown(line)}
        if lines:
            panels[task] = lines, start
    if not panels:
        return None
    figure, axes = grid(len(panels))
    for ax, (task, (lines, start)) in zip(axes, panels.items(), strict=True):
        label = "heads masked, N"
        for line, points in lines.items():
            draw_line(ax, line, points)
            draw_paper(ax, setups, task, "num_heads", line)
            if (r := tables.correlation(line.method, points, start)) is not None:
                name = name_of(line).replace("random heads as published", "published draws")
                label += f"\nr {name.replace('random heads', 'random draws')}: {r:+.2f}".replace("-", "−")
        numbers = sorted({n for points in lines.values() for n in points})
        if len(numbers) > 2 and len({b / a for a, b in itertools.pairwise(numbers) if a}) == 1:
            ax.set_xscale("log", base=2)                            # doubling numbers at equal distances
            ax.set_xticks(numbers[::1 + len(numbers) // 8])
            ax.xaxis.set_major_formatter(ScalarFormatter())
            ax.xaxis.set_minor_formatter(NullFormatter())
        finish_panel(ax, task, start, label)
    finish(figure, runs_of(setups, panels, lambda setup: setup.method == "greedy" or setup.n and is_shown(setup)),
           "band and dots: range and single draws of random heads",
           "r: Pearson, over N; masked models with N = 0 (greedy), DeCoRe without")
    return figure, ("score against the number of masked heads, retrieval heads (solid) and random heads (dashed, with "
                    "the range of the draws)")


def draw_line(ax, line, points):
    """points: {N: [score of each draw]}"""
    colour, marker = STYLE[line.method]
    numbers = sorted(points)
    if line.random:
        ax.fill_between(numbers, [min(points[n]) for n in numbers], [max(points[n]) for n in numbers], color=colour,
                        alpha=0.13, linewidth=0)
        for n in numbers:
            ax.plot([n] * len(points[n]), points[n], ".", color=colour, markersize=2, alpha=0.6)
    ax.plot(numbers, [np.mean(points[n]) for n in numbers], DASHES[line.random], color=colour, marker=marker,
            markersize=4, linewidth=1.3, markerfacecolor="white" if line.random else colour, label=name_of(line))


def draw_paper(ax, setups, task, column, line):
    """The paper's own points of a method, in grey. column: "num_heads" or "alpha"."""
    points = published.points(column, tables.model_of(setups), task, published.method_of(line))
    if points:
        ax.plot(*zip(*points, strict=True), DASHES[line.random], color="#999999", marker=STYLE[line.method][1],
                markersize=3, linewidth=0.8, markerfacecolor="white", label="the paper's values")


def finish_panel(ax, task, start, label):
    name, metric, labels = published.TASKS[task]
    if start is not None:
        ax.axhline(start, color="black", linestyle=":", linewidth=1, label="greedy")
    ax.set_title(name, fontsize=SMALL, loc="left")
    ax.set_xlabel(label, fontsize=TINY, loc="left")
    ax.set_ylabel(labels[metric] or "%", fontsize=TINY)
    if scale(metric) == 100:
        ax.set_ylim(-4, 104)                    # the whole range, so that a small change looks small
    else:
        ax.margins(y=0.12)


def alpha_figure(setups, tasks):
    """Score against α of DeCoRe static, one line per N."""
    options = {"", *(setup.options for setup in typical(setups))}
    shown = [setup for setup in setups
             if setup.method == "decore-static" and not setup.random and setup.options in options]
    panels = {}
    for task in tasks:
        metric, lines = published.headline(task)[0], {}
        for setup in shown:
            for run in setups[setup].get(task, []):
                if run.means.get(metric) is not None:
                    lines.setdefault(setup.n, {})[setup.alpha] = mean_of(run, metric)
        if any(len(points) > 2 for points in lines.values()):
            panels[task] = dict(sorted(lines.items())), tables.curves(setups, task, metric)[1]
    if not panels:
        return None
    entropy = next((setup for setup in typical(setups) if setup.method == "decore-entropy"), None)
    numbers = sorted({n for lines, _ in panels.values() for n in lines})
    figure, axes = grid(len(panels))
    for ax, (task, (lines, start)) in zip(axes, panels.items(), strict=True):
        for n, points in lines.items():
            points |= {0.0: start} if start is not None else {}         # at α = 0 nothing is contrasted
            i = numbers.index(n)
            ax.plot(*zip(*sorted(points.items()), strict=True), color=CYCLE[i % len(CYCLE)],
                    marker=MARKERS[i % len(MARKERS)], markersize=3.5, linewidth=1.2, label=f"DeCoRe static, N = {n}")
        if entropy and task in setups[entropy]:
            ax.axhline(mean_of(setups[entropy][task][0], published.headline(task)[0]), linestyle="-.", linewidth=1,
                       color=STYLE["decore-entropy"][0], label=name_of(entropy))
        draw_paper(ax, setups, task, "alpha", shown[0])
        finish_panel(ax, task, start, "α")
    finish(figure, runs_of(setups, panels, lambda setup: setup.method == "greedy" or setup in (*shown, entropy)))
    return figure, "score against α of DeCoRe static"


# Entropies

def entropy_figure(setups, tasks):
    """Base entropy per token of each method. Tests: is it below greedy's, and DeCoRe's below ITI's and DoLa's?"""
    methods = typical(setups)
    panels = {task: {setup: values for setup in methods if task in setups[setup]
                     and len(values := base_entropies(setups[setup][task][0])) > 2} for task in tasks}
    panels = {task: entropies for task, entropies in panels.items() if entropies}
    if not panels:
        return None
    figure, axes = grid(len(panels), height=0.65 + 0.24 * len(methods), sharey=True)
    for ax, (task, entropies) in zip(axes, panels.items(), strict=True):
        rivals = {setup: values for setup, values in entropies.items() if setup.method in tables.RIVALS}
        greedy = next((values for setup, values in rivals.items() if setup.method == "greedy"), None)
        most = max(np.percentile(values, 99.5) for values in entropies.values()) or 1e-3
        label = "base entropy, nats per token"
        for setup, values in entropies.items():
            at = len(methods) - 1 - methods.index(setup)
            draw_violin(ax, values, at, STYLE[setup.method][0], most)
            test = greedy is not None and greedy is not values and significance.t_test(values, greedy, "less")
            if test:
                ax.text(1.0, at, tables.p_text(test.pvalue), fontsize=TINY - 0.5, ha="right", va="bottom",
                        transform=ax.get_yaxis_transform())
            for rival in rivals if setup.method == "decore-entropy" else ():
                if test := significance.t_test(values, rivals[rival], "less"):
                    label += f"\nDeCoRe < {rival}: {tables.p_text(test.pvalue)}"
        ax.set_yticks(range(len(methods)), [name_of(setup) for setup in reversed(methods)], fontsize=TINY)
        ax.set_xlim(0, most * 1.4)
        ax.set_title(published.TASKS[task][0], fontsize=SMALL, loc="left")
        ax.set_xlabel(label, fontsize=TINY)
    finish(figure, runs_of(setups, panels, lambda setup: setup in methods),
           "line: mean; box: quartiles; p: Welch's t-test, one-sided, entropy below greedy's; below the panels: DeCoRe "
           "entropy's below the others'; drawn up to the 99.5th percentile")
    return figure, "base entropy per token of each method"


def draw_violin(ax, values, at, colour, most):
    """A density above its base line, with mean and quartiles."""
    if np.std(values) > 1e-9:
        x = np.linspace(0, most, 300)
        density = gaussian_kde(values, 0.25)(x)
        ax.fill_between(x, at, at + 0.75 * density / density.max(), color=colour, alpha=0.35, linewidth=0)
    ax.plot(np.percentile(values, [25, 75]), [at, at], color=colour, linewidth=4, solid_capstyle="butt")
    ax.plot([values.mean()] * 2, [at - 0.12, at + 0.6], color=colour, linewidth=1.5)


def correctness_figure(setups, tasks):
    """Entropies of correct and incorrect answers: densities, and the chance of a correct answer as entropy grows."""
    dola = "dola-low" if any(setup.method == "dola-low" for setup in setups) else "dola-high"     # the paper names none
    shown = ("greedy", dola, "decore-entropy")
    methods = sorted((setup for setup in typical(setups) if setup.method in shown),
                     key=lambda setup: shown.index(setup.method))
    panels = {task: {setup: pair for setup in methods if task in setups[setup]
                     and (pair := tables.answers(setups[setup][task][0]))} for task in tasks}
    panels = {task: pairs for task, pairs in panels.items() if pairs}
    if not panels:
        return None
    figure, axes = grid(2 * len(methods) * len(panels), len(methods), 1.5)
    for row, (task, pairs) in enumerate(panels.items()):
        for column, setup in enumerate(methods):
            above, below = axes[2 * row * len(methods) + column::len(methods)][:2]
            if setup in pairs:
                draw_densities(above, *pairs[setup])
                draw_regression(below, *pairs[setup])
                above.set_title(f"{published.TASKS[task][0]}\n{name_of(setup)}", fontsize=SMALL - 1, loc="left")
            else:
                above.set_axis_off()
                below.set_axis_off()
    finish(figure, runs_of(setups, panels, lambda setup: setup in methods),
           "R²: McFadden's pseudo-R², no penalty")
    return figure, "base entropy of correct and incorrect answers, with a logistic regression"


SIDES = (("correct", "#0072B2", "-"), ("incorrect", "#D55E00", "--"))


def draw_densities(ax, entropies, right):
    bins = np.linspace(0, max(entropies.max(), 1e-6), 25)
    for (name, colour, dash), values in zip(SIDES, (entropies[right], entropies[~right]), strict=True):
        ax.hist(values, bins, density=True, histtype="stepfilled", facecolor=f"{colour}33", edgecolor=colour,
                linestyle=dash, linewidth=1.2)
        ax.axvline(values.mean(), color=colour, linestyle=dash, linewidth=0.8, label=name)
    ax.set_xlim(0, bins[-1])
    ax.set_ylabel("density", fontsize=TINY)


def draw_regression(ax, entropies, right):
    fit = significance.logistic(entropies, right)
    x = np.linspace(0, max(entropies.max(), 1e-6), 200)
    if fit:
        ax.plot(x, 1 / (1 + np.exp(-(fit.intercept + fit.slope * x))), color="black", linewidth=1.2,
                label="logistic regression")
    for tenth in np.array_split(np.argsort(entropies, kind="stable"), 10):
        if len(tenth):
            ax.plot(entropies[tenth].mean(), right[tenth].mean(), "o", color="black", markersize=3,
                    label="share correct, tenths of the examples")
    for (_, colour, _), values, at in zip(SIDES, (entropies[right], entropies[~right]), (1.04, -0.04), strict=True):
        ax.plot(values, np.full(len(values), at), "|", color=colour, markersize=4, alpha=0.35)
    ax.set_xlim(0, x[-1])
    ax.set_ylim(-0.1, 1.1)
    ax.set_xlabel("base entropy, nats per token" + (f"\nR² = {fit.pseudo_r2:.3f}" if fit else ""), fontsize=TINY)
    ax.set_ylabel("correct", fontsize=TINY)


FIGURES = {"heads": heads_figure, "alpha": alpha_figure, "entropy": entropy_figure, "correctness": correctness_figure}
