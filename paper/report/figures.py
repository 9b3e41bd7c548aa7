"""The paper's figures of stored runs (evaluate.py report DIR --plots OUT) and of head files (report heads --plots OUT).

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and dashes repeat the information.
The foot of each figure says which runs it shows."""

import itertools
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paper import numbers
from paper.numbers import TASKS
from paper.report import significance, tables
from paper.report.frame import by_task, headline_values, typical
from paper.report.stored import METHODS, base_entropies

WIDTH, PANEL = 7.6, 2.1  # inches across the page and per row of panels
matplotlib.rcParams.update(
    {
        "font.size": 6.5,
        "axes.titlesize": 8,
        "axes.labelsize": 6.5,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "axes.titlelocation": "left",
        "xaxis.labellocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "savefig.dpi": 150,
    }
)
COLOURS = [
    "#000000",
    "#0072B2",
    "#009E73",
    "#D55E00",
    "#66A182",
    "#F0E442",
    "#882255",
    "#7A5C00",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#7F7F7F",
]  # of METHODS
COLOUR = dict(zip(METHODS, COLOURS, strict=True))
CYCLE, MARKERS = ["#0072B2", "#009E73", *COLOURS[7:]], "ovDs^P<>X*"  # of the lines of a figure
LEVELS = {None: ":", "output": "-.", "query": "--"}  # greedy, ways of masking


def draw_all(frame, folder):
    """Writes every figure that the runs have data for. Returns [(path, caption)]."""
    folder, pictures = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    for title, same in frame.groupby("title"):
        for name, kind in itertools.product(numbers.GROUPS, FIGURES):
            draw, caption = FIGURES[kind]
            shown = same[same["task"].isin(numbers.GROUPS[name])]
            if len(shown) and (figure := draw(shown)):
                parts = dict.fromkeys([kind, title, name.lower()])
                path = folder / ("-".join(parts).replace(", ", "-").replace(" ", "-") + ".png")
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
        ax.xaxis.set_major_locator(MaxNLocator(4))
    for ax in axes[panels:]:
        ax.set_axis_off()
    return figure, axes[:panels]


def finish(figure, runs, *notes):
    """Adds the legend of all labelled lines, and a foot that says which runs the figure shows."""
    handles = {
        label: line
        for ax in figure.axes
        for line, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    if handles:
        columns = 2 if max(map(len, handles)) > 36 else 3
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns)
        figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(handles) // columns))
    lengths = {task: [len(run.lines) for run in runs if run.task == task] for task in TASKS}
    facts = {
        "model": [Path(run.header["model"]).name for run in runs],
        "n": [
            f"{task} {tables.low_to_high(numbers)}" for task, numbers in lengths.items() if numbers
        ],
        "seeds of random heads": [run.header.get("seed") for run in runs if run.setup.random_heads],
        "mask": [run.setup.mask for run in runs if run.setup.mask],
        "dtype": [run.header.get("dtype") for run in runs],
        "commit": [str(run.header.get("commit"))[:8] for run in runs],
    }
    foot = [
        f"{name}: {', '.join(map(str, dict.fromkeys(values)))}"
        for name, values in facts.items()
        if values
    ]
    foot = textwrap.fill(" · ".join([*foot, *notes]), 150, break_on_hyphens=False)
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=6.5, color="#444444")


# Scores against N and against α


def sweep_figure(field, frame):
    """Score against "num_heads" or "alpha": a panel per task, a line per setup.

    Against N: retrieval heads, and random heads with the range of their draws. Against α: DeCoRe static, a line per
    N."""
    by_alpha, usual = field == "alpha", typical(frame)
    free = dict.fromkeys(["num_heads", "alpha" if by_alpha else "random_heads"])
    kinds = {
        replace(run.setup, **free)
        for run in usual["run"]
        if run.setup.num_heads is not None and (run.setup.method == "decore-static" or not by_alpha)
    }
    swept = frame[[replace(run.setup, **free) in kinds for run in frame["run"]]]
    panels = {task: curves for task in TASKS if (curves := tables.curves(swept, task, field))}
    if not panels:
        return None
    names = [*dict.fromkeys(name for curves in panels.values() for name, _ in curves)]
    figure, axes = grid(len(panels), height=PANEL + 0.12 * len(names) * (not by_alpha))
    drawn = []
    for ax, (task, curves) in zip(axes, panels.items(), strict=True):
        label, papers = "α" if by_alpha else "heads masked, N", set()
        for name, curve in curves:
            run, i = curve["run"].iloc[0], names.index(name)
            random = ", random heads" * bool(run.setup.random_heads)
            greedy = tables.greedy_mean(frame, task, run.setup.variant)
            if by_alpha and greedy is not None:  # at α = 0 nothing is contrasted
                curve = pd.concat(
                    [curve[curve["alpha"] != 0], pd.DataFrame([{"alpha": 0.0, "value": greedy}])]
                )
            scores = curve.groupby(field)["value"]
            if (
                not by_alpha
                and (r := tables.correlation(run.setup.method, scores.mean(), greedy)) is not None
            ):
                label += f"\nr {name}: {r:+.2f}".replace(
                    "random heads as published", "published draws"
                )
            style = {"color": CYCLE[i % len(CYCLE)], "marker": MARKERS[i % len(MARKERS)]}
            ax.plot(
                scores.mean(),
                "--" if random else "-",
                markersize=4,
                linewidth=1.3,
                label=name,
                markerfacecolor="white" if random else style["color"],
                **style,
            )
            if random:
                low, high = scores.min(), scores.max()
                ax.fill_between(low.index, low, high, color=style["color"], alpha=0.13, linewidth=0)
                ax.plot(
                    curve[field], curve["value"], ".", color=style["color"], markersize=2, alpha=0.6
                )
            method = METHODS[run.setup.method] + random
            paper = numbers.points(field, run.model, task, numbers.method_of(run.setup))
            if paper and method not in papers:  # two samplers have one line of the paper's
                papers.add(method)
                ax.plot(
                    *zip(*paper, strict=True),
                    ":",
                    markersize=3,
                    linewidth=0.8,
                    alpha=0.6,
                    markerfacecolor="white",
                    label=f"the paper: {method}",
                    **style,
                )
        levels = headline_values(usual, task)
        levels = levels[
            levels["method"].isin(["greedy", "decore-entropy"] if by_alpha else ["greedy"])
        ]
        for run, value in zip(levels["run"], levels["value"], strict=True):
            ax.axhline(
                value,
                linestyle=LEVELS[run.setup.mask],
                linewidth=1,
                color=COLOUR[run.setup.method],
                label=str(run.setup),
            )
        drawn += itertools.chain(levels["run"], *(curve["run"] for _, curve in curves))
        ax.set(title=TASKS[task][0], xlabel=label, ylabel=numbers.headline(task)[1])
    notes = (
        ()
        if by_alpha
        else (
            "band and dots: range and single draws of random heads",
            "r: Pearson, over N; masked models with N = 0 (greedy), DeCoRe without",
        )
    )
    finish(figure, drawn, *notes)
    return figure


# Entropies


def entropy_figure(frame):
    """Base entropy per token of each method. Tests: DeCoRe's below greedy's, ITI's and DoLa's."""
    shown = typical(frame[frame["metric"] == "entropy"])
    panels, setups = by_task(shown), [*shown["setup"].unique()]
    if not panels:
        return None
    figure, axes = grid(len(panels), height=0.65 + 0.24 * len(setups), sharey=True)
    for ax, (task, same) in zip(axes, panels, strict=True):
        entropies = {run: base_entropies(run) for run in same["run"]}
        decore = {
            run.setup.variant: values
            for run, values in entropies.items()
            if run.setup.method == "decore-entropy"
        }
        tests = {}  # rival → texts of p, one for each variant of the setups
        for run, values in entropies.items():
            violin = ax.violinplot(
                [values],
                [-setups.index(str(run.setup))],
                orientation="horizontal",
                side="high",
                widths=1.5,
                bw_method=0.25,
                showmeans=True,
                showextrema=False,
                quantiles=[0.25, 0.75],
            )
            for part in (*violin["bodies"], violin["cmeans"], violin["cquantiles"]):
                part.set_color(COLOUR[run.setup.method])
            violin["cquantiles"].set_linewidth(0.6)
            test = significance.t_test(decore.get(run.setup.variant, ()), values, "less")
            if test and run.setup.method in tables.RIVALS:
                tests.setdefault(run.plain, []).append(tables.p_text(test.pvalue))
        label = "\n".join(
            [
                "base entropy, nats per token",
                *(f"DeCoRe < {rival}: {', '.join(texts)}" for rival, texts in tests.items()),
            ]
        )
        highest = max(np.percentile(values, 99.5) for values in entropies.values()) or 1e-3
        ax.set_yticks(range(0, -len(setups), -1), setups)
        ax.set(title=TASKS[task][0], xlabel=label, xlim=(0, highest * 1.02))
    finish(
        figure,
        shown["run"],
        "density, mean (thick line) and quartiles (thin), up to the 99.5th percentile; p: "
        "Welch's t-test, one-sided, DeCoRe entropy's below the others'",
    )
    return figure


def correctness_figure(frame):
    """Entropies of correct and incorrect answers: densities, and the chance of a correct answer as entropy grows."""
    dola = "dola-low" if "dola-low" in {*frame["method"]} else "dola-high"  # the paper names none
    shown = typical(frame[frame["metric"] == "entropy"])
    shown = shown[shown["method"].isin(["greedy", dola, "decore-entropy"])]
    panels = [
        (run, *answers)
        for _, same in by_task(shown)
        for run in same["run"]
        if (answers := tables.judged_answers(run))
    ]
    if not panels:
        return None
    figure, axes = grid(len(panels))
    for ax, (run, predictors, right) in zip(axes, panels, strict=True):
        entropies = predictors[:, 0]
        fit, end, density = (
            significance.logistic(predictors[:, :1], right),
            max(entropies.max(), 1e-6),
            ax.twinx(),
        )
        x, bins = np.linspace(0, end, 200), np.linspace(0, end, 25)
        for values, name, colour, dash in (
            (entropies[right], "correct", "#0072B2", "-"),
            (entropies[~right], "incorrect", "#D55E00", "--"),
        ):
            density.hist(
                values,
                bins,
                density=True,
                histtype="stepfilled",
                facecolor=f"{colour}33",
                edgecolor=colour,
                linestyle=dash,
                linewidth=0.8,
            )
            density.axvline(values.mean(), color=colour, linestyle=dash, linewidth=0.8, label=name)
        for tenth in filter(len, np.array_split(np.argsort(entropies, kind="stable"), 10)):
            ax.plot(
                entropies[tenth].mean(),
                right[tenth].mean(),
                "o",
                color="black",
                markersize=3,
                label="share correct, tenths of the examples",
            )
        if fit:
            (intercept, slope), r2 = fit
            ax.plot(
                x,
                1 / (1 + np.exp(-(intercept + slope * x))),
                color="black",
                label="logistic regression",
            )
        ax.set(
            title=f"{TASKS[run.task][0]}\n{textwrap.fill(str(run.setup), 28)}",
            ylabel="correct",
            xlabel="base entropy, nats per token" + (f"\nR² = {r2:.3f}" if fit else ""),
            xlim=(0, end),
            ylim=(-0.1, 1.1),
        )
    finish(
        figure,
        [run for run, *_ in panels],
        "right axis: density; vertical lines: means; R²: McFadden's pseudo-R², no penalty",
    )
    return figure


FIGURES = {
    "heads": (
        partial(sweep_figure, "num_heads"),
        "score against the number of masked heads, retrieval heads (solid) "
        "and random heads (dashed, with the range of the draws)",
    ),
    "alpha": (partial(sweep_figure, "alpha"), "score against α of DeCoRe static"),
    "entropy": (entropy_figure, "base entropy per token of each method"),
    "correctness": (
        correctness_figure,
        "base entropy of correct and incorrect answers, with a logistic regression",
    ),
}


# Head files


def head_curves(files):
    """Figure of the sorted retrieval scores of several models. files: {path: scores}"""
    figure, [ax] = grid(1, height=3.0)
    for i, (path, scores) in enumerate(files.items()):
        ax.semilogx(
            range(1, len(scores) + 1),
            sorted(scores.values(), reverse=True),
            ("-", "--")[i % 2],
            color=CYCLE[i % len(CYCLE)],
            linewidth=1.4,
            marker=MARKERS[i % len(MARKERS)],
            markevery=0.2,
            markersize=4,
            label=path.stem,
        )
    ax.axhline(numbers.RETRIEVAL, color="#999999", linestyle=":", linewidth=1)
    ax.set(xlabel="rank of the head", ylabel="retrieval score")
    finish(figure, [], "retrieval scores of all heads, sorted")
    return figure


def head_maps(files):
    """Figure of the retrieval scores of several models by layer and head. files: {path: scores}"""
    figure, axes = grid(len(files), height=2.3)
    highest = max(
        1, *(max(scores.values()) for scores in files.values())
    )  # by the published rule a score may exceed 1
    for ax, (path, scores) in zip(axes, files.items(), strict=True):
        table = np.zeros(np.add(max(scores), 1))  # [L, H]
        table[tuple(np.transpose([*scores]))] = [*scores.values()]
        image = ax.imshow(
            table,
            norm=PowerNorm(0.5, 0, highest),
            aspect="auto",
            origin="lower",
            interpolation="nearest",
        )
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set(title=path.stem, xlabel="head", ylabel="layer")
    figure.colorbar(
        image,
        ax=axes,
        location="right",
        shrink=0.5,
        aspect=30,
        label="retrieval score (colour by its square root)",
    )
    finish(figure, [], "retrieval score of every head, layer 0 at the bottom")
    return figure
