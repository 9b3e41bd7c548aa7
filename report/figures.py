"""The paper's figures, drawn from stored runs and head files without a screen.

    python evaluate.py report DIR --plots OUT

Colours are Okabe and Ito's, which colour-blind people can tell apart; markers and dashes say the same again. Every
picture is as wide as a page and says in small print what it was made from."""

import datetime
import itertools
import textwrap
from pathlib import Path

import numpy as np

try:
    import scipy.stats
    import statsmodels  # noqa: F401  significance.py needs it
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter, StrMethodFormatter
except ImportError as error:
    raise ImportError("--plots needs matplotlib, scipy and statsmodels: pip install 'decore[report]' "
                      f"({error})") from None

from heads import find_file, known, load_scores
from report import published, significance, tables
from report.published import headline
from report.stored import METHODS, base_entropies, grouped, mean_of, scale, typical
from runtime.files import read_json

WIDTH, PANEL, DPI = 7.6, 2.1, 150               # inches across the page and per row of panels; dots per inch
STYLE = {                                       # method → colour, marker
    "greedy": ("#000000", "s"), "masked": ("#0072B2", "v"), "decore-static": ("#009E73", "D"),
    "decore-entropy": ("#D55E00", "o"), "decore-static-lite": ("#66A182", "d"),
    "decore-entropy-lite": ("#F0E442", "h"), "iti": ("#882255", "p"), "cad": ("#CC79A7", "^"), "cd": ("#7A5C00", "<"),
    "dola-low": ("#56B4E9", ">"), "dola-high": ("#E69F00", "P"), "ad": ("#7F7F7F", "X")}
CYCLE = ["#0072B2", "#009E73", "#D55E00", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F7F7F", "#7A5C00",
         "#882255"]
ENTROPY = STYLE["decore-entropy"][0]
FOR_N = [colour for colour in CYCLE if colour not in (ENTROPY, "#000000")]
MARKERS = "ovDs^P<>X*"
DASHES = ("-", "--")
SMALL, TINY = 8, 6.5                            # points


def draw_all(runs, folder, heads=()):
    """Write every picture that the runs, the known head files and `heads` give → [(path, caption)]."""
    folder, made, files = Path(folder), [], list(dict.fromkeys([*map(find_file, heads), *known()]))
    folder.mkdir(parents=True, exist_ok=True)
    for model, every in grouped(runs)[0].items():
        for mask, (group, columns) in itertools.product(masks_of(every), published.GROUPS.items()):
            setups = {setup: by_task for setup, by_task in every.items() if setup.mask in (None, mask)}
            tasks = [task for task in published.tasks_of(setups) if any(task == column[0] for column in columns)]
            label, suffix = (f"{model}, query mask", "-query") if mask == "query" else (model, "")
            for name, draw in FIGURES.items() if tasks else ():
                if found := draw(model, setups, tasks):
                    figure, caption = found
                    parts = dict.fromkeys((name, model, group.lower().replace(" ", "-")))
                    made.append(save((figure, f"{label}: {caption}"), folder / f"{'-'.join(parts)}{suffix}.png"))
    made += [save(head_curves(files), folder / "head-curves.png"), save(head_maps(files), folder / "head-maps.png")]
    return made


def masks_of(setups):
    """The ways of masking that were run; each has pictures of its own. [None] where no head was masked."""
    return sorted({setup.mask for setup in setups if setup.mask}) or [None]


def save(found, path):
    figure, caption = found
    figure.savefig(path, dpi=DPI, metadata={"Description": caption})
    return path, caption


def grid(panels, columns=3, height=PANEL, **options):
    """A figure of the page's width with this many panels → (figure, axes). Unused places stay empty."""
    columns = min(columns, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(WIDTH, rows * height + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for ax in axes:
        ax.tick_params(labelsize=SMALL - 1)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[panels:]:
        ax.set_axis_off()
    return figure, axes[:panels]


def small_print(figure, runs, *more):
    """What the picture was made from, at its foot."""
    def these(name, default="unknown", cut=None):
        found = dict.fromkeys(str(run.settings.get(name) or default).split("/")[-1][:cut] for run in runs)
        return ", ".join(sorted(found)[:3]) + f" and {len(found) - 3} more" * (len(found) > 3)

    counts = {}
    for run in runs:
        counts.setdefault(run.task, set()).add(len(run.lines))
    n = ", ".join(f"{task} {tables.spanned(numbers)}" for task, numbers in counts.items())
    random = sorted({run.settings["seed"] for run in runs if run.setup.random})
    seeds = f"seeds of random heads: {', '.join(map(str, random))}" if random else "no random heads"
    foot(figure, " · ".join([
        these("model"), f"n: {n}", seeds, f"mask {these('mask', 'none')}", these("dtype"), f"run on {these('date')}",
        f"commit {these('commit', cut=8)}", f"drawn {datetime.date.today()}", *more]))


def foot(figure, text):
    lines = textwrap.wrap(text, 150, break_on_hyphens=False)
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=TINY, color="#444444")


def legend(figure, handles, columns=4):
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, fontsize=SMALL, frameon=False)


def runs_of(setups, tasks, keep=lambda setup: True):
    return [run for setup, by_task in setups.items() if keep(setup) for task in tasks for run in by_task.get(task, [])]


# Performance against N and against α

def heads_figure(model, setups, tasks):
    """Score against N: retrieval heads, and random heads with the range of their draws."""
    alpha = next((setup.alpha for setup in typical(setups) if setup.method == "decore-static"), None)
    panels = {}
    for task in tasks:
        lines, start = tables.curves(setups, task, headline(task)[0])
        lines = {(method, random): points for (method, random, at, *_, variant), points in lines.items()
                 if len(points) > 1 and at in (None, alpha) and not variant}
        if lines:
            panels[task] = lines, start
    if not panels:
        return None
    figure, axes = grid(len(panels))
    printed = False
    for ax, (task, (lines, start)) in zip(axes, panels.items(), strict=True):
        correlations = [draw_line(ax, key, points, start) for key, points in lines.items()]
        printed |= draw_paper(ax, model, task, "num_heads", lines)
        numbers = sorted({n for points in lines.values() for n in points})
        spaced(ax, numbers)
        finish_panel(ax, task, start, "heads masked, N\n" + "\n".join(filter(None, correlations)))
    shown = dict.fromkeys(key for lines, _ in panels.values() for key in lines)
    handles = [line_handle(method, random, alpha) for method, random in shown] + [start_handle()]
    legend(figure, handles + [paper_handle()] * bool(printed))
    small_print(figure, runs_of(setups, panels, lambda s: is_greedy_or_masked(s, alpha)),
                "band and dots: range and single draws of random heads",
                "r: Pearson, over N; masked models with N = 0 (greedy), DeCoRe without")
    return figure, ("score against the number of masked heads, retrieval heads (solid) and random heads (dashed, with "
                    "the range of the draws)")


def is_greedy_or_masked(setup, alpha):
    return setup.method == "greedy" or setup.n is not None and setup.alpha in (None, alpha)


def draw_line(ax, key, points, start):
    """One line of the figure → a text with its Pearson r."""
    method, random = key
    colour, marker = STYLE[method]
    numbers = sorted(points)
    means = [np.mean(points[n]) for n in numbers]
    if random:
        ax.fill_between(numbers, [min(points[n]) for n in numbers], [max(points[n]) for n in numbers], color=colour,
                        alpha=0.13, linewidth=0)
        for n in numbers:
            ax.plot([n] * len(points[n]), points[n], ".", color=colour, markersize=2, alpha=0.6)
    ax.plot(numbers, means, "--" if random else "-", color=colour, marker=marker, markersize=4, linewidth=1.3,
            markerfacecolor="white" if random else colour)
    r = tables.correlation(method, points, start)
    return f"r {METHODS[method]}{', random' * random}: {r:+.2f}".replace("-", "−") if r is not None else ""


def draw_paper(ax, model, task, across, methods):
    """The paper's own points along `across`, in grey; whether there are any."""
    drawn = False
    for method, random in methods:
        name = published.RANDOM.get(method) if random else method
        points = published.points(across, model, task, name, headline(task)[0])
        if points:
            ax.plot(*zip(*points, strict=True), "--" if random else "-", color="#999999", marker=STYLE[method][1],
                    markersize=3, linewidth=0.8, markerfacecolor="white")
            drawn = True
    return drawn


def spaced(ax, numbers):
    """Doubling numbers at equal distances."""
    if len(numbers) > 2 and len({b / a for a, b in zip(numbers, numbers[1:], strict=False) if a}) == 1:
        ax.set_xscale("log", base=2)
    ax.set_xticks(numbers[::1 + len(numbers) // 8])
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())


def finish_panel(ax, task, start, label):
    if start is not None:
        ax.axhline(start, color="black", linestyle=":", linewidth=1)
    ax.set_title(headline(task)[1], fontsize=SMALL, loc="left")
    ax.set_xlabel(label, fontsize=TINY)
    if scale(headline(task)[0]) == 100:
        ax.set_ylabel("%", fontsize=TINY)
        ax.set_ylim(-4, 104)                    # all of it: a small change looks small
    else:
        ax.set_ylabel("score", fontsize=TINY)
        ax.margins(y=0.12)


def line_handle(method, random, alpha=None):
    colour, marker = STYLE[method]
    name = METHODS[method] + (f", α = {alpha:g}" if method == "decore-static" and alpha is not None else "")
    return Line2D([], [], color=colour, marker=marker, linestyle="--" if random else "-", markersize=4,
                  markerfacecolor="white" if random else colour, label=name + ", random heads" * random)


def start_handle():
    return Line2D([], [], color="black", linestyle=":", label="greedy")


def paper_handle():
    return Line2D([], [], color="#999999", marker="o", markersize=3, markerfacecolor="white",
                  label="the paper's values")


def alpha_figure(model, setups, tasks):
    """Score against α of DeCoRe static, one line per N."""
    panels = {}
    for task in tasks:
        lines = alpha_lines(setups, task)
        if any(len(points) > 2 for points in lines.values()):
            panels[task] = lines
    if not panels:
        return None
    entropy = next((setup for setup in typical(setups) if setup.method == "decore-entropy"), None)
    numbers = sorted({n for lines in panels.values() for n in lines})
    figure, axes = grid(len(panels))
    printed = False
    for ax, (task, lines) in zip(axes, panels.items(), strict=True):
        metric = headline(task)[0]
        start = tables.curves(setups, task, metric)[1]
        for n, points in sorted(lines.items()):
            points |= {0.0: start} if start is not None else {}         # at α = 0 nothing is contrasted
            colour, marker = FOR_N[numbers.index(n) % len(FOR_N)], MARKERS[numbers.index(n) % len(MARKERS)]
            ax.plot(*zip(*sorted(points.items()), strict=True), color=colour, marker=marker, markersize=3.5,
                    linewidth=1.2)
        if entropy and task in setups[entropy]:
            ax.axhline(mean_of(setups[entropy][task][0], metric), color=ENTROPY, linestyle="-.", linewidth=1)
        printed |= draw_paper(ax, model, task, "alpha", {("decore-static", False)})
        finish_panel(ax, task, start, "α")
    handles = [Line2D([], [], color=FOR_N[i % len(FOR_N)], marker=MARKERS[i % len(MARKERS)], markersize=4,
                      label=f"static, N = {n}")
               for i, n in enumerate(numbers)] + [start_handle()]
    if entropy:
        handles.append(Line2D([], [], color=ENTROPY, linestyle="-.", label=str(entropy)))
    legend(figure, handles + [paper_handle()] * printed, 3)
    small_print(figure, runs_of(setups, panels, lambda s: s.method in ("greedy", "decore-static") or s == entropy))
    return figure, "score against α of DeCoRe static"


def alpha_lines(setups, task):
    """{N: {α: score}} of DeCoRe static with retrieval heads."""
    metric, lines = headline(task)[0], {}
    for setup, by_task in setups.items():
        if setup.method == "decore-static" and not setup.random and not setup.variant and task in by_task:
            if (mean := mean_of(by_task[task][0], metric)) is not None:
                lines.setdefault(setup.n, {})[setup.alpha] = mean
    return lines


# Entropies

def entropy_figure(model, setups, tasks):
    """Base entropy per token of each method, and whether it is below greedy's."""
    methods = typical(setups)
    panels = {task: {setup: values for setup in methods if task in setups[setup]
                     and len(values := base_entropies(setups[setup][task][0])) > 2} for task in tasks}
    panels = {task: found for task, found in panels.items() if found}
    if not panels:
        return None
    figure, axes = grid(len(panels), height=0.55 + 0.24 * len(methods), sharey=True)
    for ax, (task, found) in zip(axes, panels.items(), strict=True):
        greedy = next((values for setup, values in found.items() if setup.method == "greedy"), None)
        most = max(np.percentile(values, 99.5) for values in found.values()) or 1e-3
        for setup, values in found.items():
            at = len(methods) - 1 - methods.index(setup)
            violin(ax, values, at, STYLE[setup.method][0], most)
            test = None if greedy is None or greedy is values else significance.t_test(values, greedy, "less")
            if test:
                ax.text(1.0, at, tables.p_value(test.p), fontsize=TINY - 0.5, ha="right", va="bottom",
                        transform=ax.get_yaxis_transform())
        ax.set_yticks(range(len(methods)), [str(setup) for setup in reversed(methods)], fontsize=TINY)
        ax.set_xlim(0, most * 1.4)
        ax.set_title(headline(task)[1], fontsize=SMALL, loc="left")
        ax.set_xlabel("base entropy, nats per token", fontsize=TINY)
    small_print(figure, runs_of(setups, panels, lambda s: s in methods),
                "line: mean; box: quartiles; p: Welch's t-test, one-sided, entropy below greedy's; drawn up to the "
                "99.5th percentile")
    return figure, "base entropy per token of each method"


def violin(ax, values, at, colour, most):
    """A density above its base line, with mean and quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    if np.std(values) > 1e-9:
        x = np.linspace(0, most, 300)
        density = scipy.stats.gaussian_kde(values, 0.25)(x)
        ax.fill_between(x, at, at + 0.75 * density / density.max(), color=colour, alpha=0.35, linewidth=0)
    ax.plot([low, high], [at, at], color=colour, linewidth=4, solid_capstyle="butt")
    ax.plot([values.mean()] * 2, [at - 0.12, at + 0.6], color=colour, linewidth=1.5)


def correctness_figure(model, setups, tasks):
    """Entropies of correct and incorrect answers: densities, and the chance of a correct answer as entropy grows."""
    dola = "dola-low" if any(setup.method == "dola-low" for setup in setups) else "dola-high"     # the paper names none
    methods = [setup for setup in typical(setups) if setup.method in ("greedy", dola, "decore-entropy")]
    methods.sort(key=lambda setup: ("greedy", dola, "decore-entropy").index(setup.method))
    panels = {task: {setup: run for setup in methods if task in setups[setup]
                     and tables.correctness_row(run := setups[setup][task][0])}
              for task in tasks if tables.scored_by_answer(task)}
    panels = {task: found for task, found in panels.items() if found}
    if not panels:
        return None
    figure, axes = grid(2 * len(methods) * len(panels), len(methods), 1.5)
    for row, (task, found) in enumerate(panels.items()):
        for column, setup in enumerate(methods):
            above, below = axes[2 * row * len(methods) + column::len(methods)][:2]
            if setup not in found:
                above.set_axis_off(), below.set_axis_off()
                continue
            entropies, good = tables.answers(found[setup])
            draw_densities(above, entropies, good)
            draw_regression(below, entropies, good)
            above.set_title(f"{headline(task)[1]}\n{setup}", fontsize=SMALL - 1, loc="left")
    sides = [Line2D([], [], color=colour, linestyle=dash, linewidth=2, label=name) for name, colour, dash in SIDES]
    legend(figure, [*sides, Line2D([], [], color="black", label="logistic regression"),
                    Line2D([], [], color="black", marker="o", linestyle="", markersize=3,
                           label="share correct, tenths of the examples")])
    small_print(figure, runs_of(setups, panels, lambda s: s in methods), "R²: McFadden's pseudo-R², no penalty")
    return figure, "base entropy of correct and incorrect answers, with a logistic regression"


SIDES = (("correct", "#0072B2", "-"), ("incorrect", "#D55E00", "--"))


def draw_densities(ax, entropies, good):
    bins = np.linspace(0, max(entropies.max(), 1e-6), 25)
    for (_, colour, dash), values in zip(SIDES, (entropies[good], entropies[~good]), strict=True):
        ax.hist(values, bins, density=True, histtype="stepfilled", color=colour, alpha=0.2)
        ax.hist(values, bins, density=True, histtype="step", color=colour, linestyle=dash, linewidth=1.2)
        ax.axvline(values.mean(), color=colour, linestyle=dash, linewidth=0.8)
    ax.set_xlim(0, bins[-1])
    ax.set_ylabel("density", fontsize=TINY)


def draw_regression(ax, entropies, good):
    fit = significance.logistic(entropies, good)
    x = np.linspace(0, max(entropies.max(), 1e-6), 200)
    if fit:
        ax.plot(x, 1 / (1 + np.exp(-(fit.intercept + fit.slope * x))), color="black", linewidth=1.2)
    for tenth in np.array_split(np.argsort(entropies, kind="stable"), 10):
        if len(tenth):
            ax.plot(entropies[tenth].mean(), good[tenth].mean(), "o", color="black", markersize=3)
    for (_, colour, _), values, at in zip(SIDES, (entropies[good], entropies[~good]), (1.04, -0.04), strict=True):
        ax.plot(values, np.full(len(values), at), "|", color=colour, markersize=4, alpha=0.35)
    ax.set_xlim(0, x[-1])
    ax.set_ylim(-0.1, 1.1)
    ax.set_xlabel("base entropy, nats per token" + (f"\nR² = {fit.pseudo_r2:.3f}" if fit else ""), fontsize=TINY)
    ax.set_ylabel("correct", fontsize=TINY)


FIGURES = {"heads": heads_figure, "alpha": alpha_figure, "entropy": entropy_figure, "correctness": correctness_figure}


# Head files

def head_curves(files):
    """Sorted retrieval scores of several models."""
    figure, [ax] = grid(1, height=3.0)
    for i, path in enumerate(files):
        ranked = sorted(load_scores(path).values(), reverse=True)
        above = sum(score > 0.1 for score in ranked)
        marked = [0, *(10 ** k - 1 for k in (1, 2, 3) if 10 ** k <= len(ranked))]
        ax.plot(range(1, len(ranked) + 1), ranked, DASHES[i % 2], color=CYCLE[i % len(CYCLE)], linewidth=1.4,
                marker=MARKERS[i % len(MARKERS)], markevery=marked, markersize=4,
                label=f"{path.stem} ({above} of {len(ranked):,} heads above .1)")
    ax.axhline(0.1, color="#999999", linestyle=":", linewidth=1)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.set_xlabel("rank of the head", fontsize=SMALL)
    ax.set_ylabel("retrieval score", fontsize=SMALL)
    ax.legend(fontsize=TINY, frameon=False)
    head_print(figure, files)
    return figure, "Retrieval scores of all heads, sorted, for several models"


def head_maps(files):
    """Retrieval score of every head of several models."""
    figure, axes = grid(len(files), 3, 2.3)
    found = [load_scores(path) for path in files]
    most = max(1, *(max(scores.values()) for scores in found))          # by the published rule a score may exceed 1
    for ax, path, scores in zip(axes, files, found, strict=True):
        table = np.zeros((1 + max(layer for layer, _ in scores), 1 + max(head for _, head in scores)))
        for head, score in scores.items():
            table[head] = score
        image = ax.imshow(table, norm=PowerNorm(0.5, 0, most), cmap="viridis", aspect="auto", origin="lower",
                          interpolation="nearest")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set_title(path.stem, fontsize=SMALL, loc="left")
        ax.set_xlabel("head", fontsize=TINY)
        ax.set_ylabel("layer", fontsize=TINY)
    bar = figure.colorbar(image, ax=axes, location="right", shrink=0.5, aspect=30)
    bar.set_label("retrieval score (colour by its square root)", fontsize=TINY)
    bar.ax.tick_params(labelsize=TINY)
    head_print(figure, files)
    return figure, "Retrieval score of every head, by layer and head, for several models"


def head_print(figure, files):
    samples = ", ".join(f"{path.stem} {read_json(path).get('samples', 'unknown')}" for path in files)
    foot(figure, f"head files · samples behind each mean: {samples} · drawn {datetime.date.today()}")
