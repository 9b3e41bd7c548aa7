"""The paper's figures of stored runs (report DIR --plots OUT) and of head files (report heads).

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and dashes
repeat the information. The foot of each figure says which runs it shows."""

import textwrap
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
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
BLACK, BLUE, GREEN, RED = "#000000", "#0072B2", "#009E73", "#D55E00"
OTHERS = "#66A182 #F0E442 #882255 #7A5C00 #CC79A7 #56B4E9 #E69F00 #7F7F7F".split()
COLOUR = dict(zip(METHODS, [BLACK, BLUE, GREEN, RED, *OTHERS], strict=True))
CYCLE, MARKERS = [BLUE, GREEN, *OTHERS[3:]], "ovDs^P<>X*"  # of the lines of a figure
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
        ax.xaxis.set_major_locator(MaxNLocator(4))
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
        columns = 2 if max(map(len, handles)) > 36 else 3
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns)
        figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(handles) // columns))
    foot = textwrap.fill(" · ".join([*facts_of(runs), *notes]), 150, break_on_hyphens=False)
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=6.5, color="#444444")


def facts_of(runs):
    """Texts about the runs, such as "dtype: float32"."""
    lengths = {}
    for run in sorted(runs, key=lambda run: list(TASKS).index(run.task)):
        lengths.setdefault(run.task, []).append(len(run.lines))
    facts = {
        "model": [Path(run.header["model"]).name for run in runs],
        "n": [f"{task} {tables.low_to_high(counts)}" for task, counts in lengths.items()],
        "seeds of random heads": [run.header.get("seed") for run in runs if run.setup.random_heads],
        "mask": [run.setup.mask for run in runs if run.setup.mask],
        "dtype": [run.header.get("dtype") for run in runs],
        "commit": [str(run.header.get("commit"))[:8] for run in runs],
    }
    texts = {name: ", ".join(map(str, dict.fromkeys(facts[name]))) for name in facts}
    return [f"{name}: {text}" for name, text in texts.items() if text]


# Scores against N and against α


def heads_figure(frame):
    """Score against N: a panel per task, retrieval heads, and random ones with their range."""
    panels = curves_by_task(frame, typical(frame), "num_heads", "random_heads")
    if not panels:
        return None
    styles = styles_of(panels)
    figure, axes = grid(len(panels), height=PANEL + 0.12 * len(styles))
    drawn = []
    for ax, (task, curves) in zip(axes, panels.items(), strict=True):
        label = "heads masked, N"
        for name, curve in curves:
            setup = curve["run"].iloc[0].setup
            means = curve.groupby("num_heads")["value"].mean()
            draw_curve(ax, means, name, styles[name], dashed=setup.random_heads)
            if setup.random_heads:
                draw_range(ax, curve, styles[name]["color"])
            greedy = tables.greedy_mean(frame, task, setup.variant)
            r = tables.correlation(setup.method, means, greedy)
            if r is not None:
                label += f"\nr {name}: {r:+.2f}"
        draw_papers(ax, "num_heads", curves, styles)
        drawn += draw_levels(ax, frame, task, ["greedy"])
        drawn += [run for _, curve in curves for run in curve["run"]]
        ax.set(title=TASKS[task][0], xlabel=label, ylabel=numbers.headline(task)[1])
    finish(
        figure,
        drawn,
        "band and dots: range and single draws of random heads",
        "r: Pearson, over N; masked models with N = 0 (greedy), DeCoRe without",
    )
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
        for name, curve in curves:
            means = curve.groupby("alpha")["value"].mean()
            greedy = tables.greedy_mean(frame, task, curve["variant"].iloc[0])
            if greedy is not None:  # at α = 0 nothing is contrasted
                means[0.0] = greedy
            draw_curve(ax, means.sort_index(), name, styles[name])
        draw_papers(ax, "alpha", curves, styles)
        drawn += draw_levels(ax, frame, task, ["greedy", "decore-entropy"])
        drawn += [run for _, curve in curves for run in curve["run"]]
        ax.set(title=TASKS[task][0], xlabel="α", ylabel=numbers.headline(task)[1])
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
    names = dict.fromkeys(name for curves in panels.values() for name, _ in curves)
    styles = {}
    for i, name in enumerate(names):
        styles[name] = {"color": CYCLE[i % len(CYCLE)], "marker": MARKERS[i % len(MARKERS)]}
    return styles


def draw_curve(ax, means, name, style, dashed=False):
    ax.plot(
        means,
        "--" if dashed else "-",
        markersize=4,
        linewidth=1.3,
        label=name,
        markerfacecolor="white" if dashed else style["color"],
        **style,
    )


def draw_range(ax, curve, colour):
    """The range of the draws as a band, each draw as a dot."""
    scores = curve.groupby("num_heads")["value"]
    low, high = scores.min(), scores.max()
    ax.fill_between(low.index, low, high, color=colour, alpha=0.13, linewidth=0)
    ax.plot(curve["num_heads"], curve["value"], ".", color=colour, markersize=2, alpha=0.6)


def draw_papers(ax, field, curves, styles):
    """The paper's points for each method, once: two samplers of random heads share a line."""
    methods = set()
    for name, curve in curves:
        run = curve["run"].iloc[0]
        method = METHODS[run.setup.method]
        if run.setup.random_heads:
            method += ", random heads"
        points = numbers.points(field, run.paper_model, run.task, numbers.method_of(run.setup))
        if points and method not in methods:
            methods.add(method)
            ax.plot(
                *zip(*points, strict=True),
                ":",
                markersize=3,
                linewidth=0.8,
                alpha=0.6,
                markerfacecolor="white",
                label=f"the paper: {method}",
                **styles[name],
            )


def draw_levels(ax, frame, task, methods):
    """Horizontal lines at the scores of these methods. Returns their runs."""
    levels = headline_values(typical(frame), task)
    levels = levels[levels["method"].isin(methods)]
    for run, value in zip(levels["run"], levels["value"], strict=True):
        ax.axhline(
            value,
            linestyle=LEVELS[run.setup.mask],
            linewidth=1,
            color=COLOUR[run.setup.method],
            label=str(run.setup),
        )
    return list(levels["run"])


# Entropies


def entropy_figure(frame):
    """Base entropy per token of each method. Tests: DeCoRe's below those of tables.RIVALS."""
    shown = typical(frame[frame["metric"] == "entropy"])
    setups = list(shown["setup"].unique())
    panels = by_task(shown)
    if not panels:
        return None
    figure, axes = grid(len(panels), height=0.65 + 0.24 * len(setups), sharey=True)
    for ax, (task, same) in zip(axes, panels, strict=True):
        highest = 0
        for run in same["run"]:
            values = base_entropies(run)
            highest = max(highest, np.percentile(values, 99.5))
            draw_violin(ax, values, -setups.index(str(run.setup)), COLOUR[run.setup.method])
        label = "\n".join(["base entropy, nats per token", *test_lines(list(same["run"]))])
        ax.set_yticks(range(0, -len(setups), -1), setups)
        ax.set(title=TASKS[task][0], xlabel=label, xlim=(0, (highest or 1e-3) * 1.02))
    finish(
        figure,
        shown["run"],
        "density, mean (thick line) and quartiles (thin), up to the 99.5th percentile; p: "
        "Welch's t-test, one-sided, DeCoRe entropy's below the others'",
    )
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
        quantiles=[0.25, 0.75],
    )
    for part in (*violin["bodies"], violin["cmeans"], violin["cquantiles"]):
        part.set_color(colour)
    violin["cquantiles"].set_linewidth(0.6)


def test_lines(runs):
    """Texts "DeCoRe < rival: p", with a p for each DeCoRe run that has this rival."""
    decore = [run for run in runs if run.setup.method == "decore-entropy"]
    lines = []
    for name in dict.fromkeys(run.plain for run in runs if run.setup.method in tables.RIVALS):
        texts = []
        for run in decore:
            rival, differs = tables.rival_of(run, name, runs)
            others = base_entropies(rival) if rival else ()
            if test := significance.t_test(base_entropies(run), others, "less"):
                texts.append(tables.p_text(test.pvalue) + differs)
        if texts:
            lines.append(f"DeCoRe < {name}: {', '.join(texts)}")
    return lines


def correctness_figure(frame):
    """Entropies of correct and incorrect answers, and the chance of a correct answer."""
    dola = "dola-low" if "dola-low" in {*frame["method"]} else "dola-high"  # the paper names none
    shown = typical(frame[frame["metric"] == "entropy"])
    shown = shown[shown["method"].isin(["greedy", dola, "decore-entropy"])]
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
        label = "base entropy, nats per token"
        if fit := draw_chances(ax, entropies, right, np.linspace(0, end, 200)):
            label += f"\nR² = {fit[2]:.3f}"
        ax.set(
            title=f"{TASKS[run.task][0]}\n{textwrap.fill(str(run.setup), 28)}",
            ylabel="share correct (line, dots)",
            xlabel=label,
            xlim=(-0.02 * end, 1.02 * end),  # the edges of the outermost bars are seen
            ylim=(-0.1, 1.1),
        )
    finish(
        figure,
        [run for run, *_ in panels],
        "vertical lines: means; R²: McFadden's pseudo-R², no penalty",
    )
    return figure


def draw_densities(ax, entropies, right, bins):
    for values, name, colour, dash in (
        (entropies[right], "correct", BLUE, "-"),
        (entropies[~right], "incorrect", RED, "--"),
    ):
        ax.hist(
            values,
            bins,
            density=True,
            histtype="stepfilled",
            facecolor=f"{colour}33",
            edgecolor=colour,
            linestyle=dash,
            linewidth=0.8,
        )
        ax.axvline(values.mean(), color=colour, linestyle=dash, linewidth=0.8, label=name)
    ax.set_ylabel("density of answers (bars)")


def draw_chances(ax, entropies, right, x):
    """Share of correct answers by tenths, and the logistic regression, which is returned."""
    order = np.argsort(entropies, kind="stable")
    for tenth in filter(len, np.array_split(order, 10)):
        ax.plot(
            entropies[tenth].mean(),
            right[tenth].mean(),
            "o",
            color=BLACK,
            markersize=3,
            label="share correct, tenths of the examples",
        )
    fit = significance.logistic(entropies, right)
    if fit:
        intercept, slope, _ = fit
        chances = 1 / (1 + np.exp(-(intercept + slope * x)))
        ax.plot(x, chances, color=BLACK, label="logistic regression")
    return fit


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
    # By the published rule a score may exceed 1.
    highest = max(1, *(max(scores.values()) for scores in files.values()))
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
