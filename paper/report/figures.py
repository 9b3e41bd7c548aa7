"""Figures of the differences to greedy decoding (report DIR --plots OUT) and of head files (report
heads).

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and dashes
repeat the information. The foot of each figure says which runs it shows."""

import itertools
import textwrap
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import CenteredNorm, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paper.printed import TASKS
from paper.report.results import NOT_RATES, order_of_row
from runtime.files import named

matplotlib.rcParams.update(
    {
        "font.size": 7,
        "axes.titlesize": 7,
        "legend.frameon": False,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "savefig.dpi": 150,
        "text.usetex": False,
        "text.parse_math": False,  # names may contain $
    }
)
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #7A5C00 #56B4E9 #E69F00 #882255 #7F7F7F".split()
COLUMNS = 3  # of panels
KINDS = {  # of results → their look, from top to bottom beside one name
    "retrieval heads": {"color": COLOURS[0], "marker": "o"},
    "random heads (crosses: draws)": {"color": COLOURS[1], "marker": "o", "mfc": "white"},
    "retrieval − random heads": {"color": COLOURS[2], "marker": "D"},
    "other methods": {"color": "#555555", "marker": "s"},
}
# What an answer is, from left to right in a bar → its colour
ANSWERS = {"passage": COLOURS[0], "memory": COLOURS[1], "neither": "#BBBBBB", "blank": "#EEEEEE"}
BARS = "bars: paired 95 % intervals"


def draw_all(tables, folder):
    """Writes the figures that `results.short_tables` has data for. Returns [(path, caption)]."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, (draw, caption) in FIGURES.items():
        if figure := draw(tables):
            path = folder / f"{name}.png"
            with named(path):
                figure.savefig(path)
            pictures.append((path, caption))
    return pictures


def figure_of(panels, draw, runs, *notes, heights=None, columns=COLUMNS):
    """A figure of the page's width; None without panels. `draw(axes, *panel)` draws a panel.

    The foot says which runs it shows. heights: of the rows of panels, in inches."""
    if not panels:
        return None
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    heights = heights or [2.2] * rows
    figure = Figure(figsize=(7.6, sum(heights) + 0.9), layout="constrained")
    handles = {}
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).flat
    for ax, panel in itertools.zip_longest(axes, panels):
        if panel is None:
            ax.set_axis_off()
        else:
            draw(ax, *panel)
    for ax in figure.axes:
        lines, labels = ax.get_legend_handles_labels()
        handles |= zip(labels, lines)
    if handles:
        columns = 4 if len(handles) <= 8 else 2
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns)
        figure.set_figheight(figure.get_figheight() + 0.05 * len(handles))
    facts = {
        "seeds of random heads": [run.header.get("seed") for run in runs if run.setup.random_heads],
        "dtype": [run.labels["dtype"] for run in runs],
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


def runs_of(tables):
    return [run for rows in tables.values() for row in rows for run in row.runs]


def title_of(key, rows):
    title, task = key
    n = sorted({row.n for row in rows})
    items = f"{n[0]:,}" if len(n) == 1 else f"{n[0]:,} to {n[-1]:,}"
    metric = rows[0].metric.replace("_", " ")
    return f"{TASKS[task][0]}, {metric}, n = {items}\n{title}"


# Differences


def difference_figure(tables):
    """A panel for each task and model: the difference of each setup to greedy decoding, and of
    retrieval heads to random heads."""
    compared = []
    for key, rows in tables.items():
        if rows := [row for row in rows if row.versus]:
            compared.append((key, rows))
    panels, heights = [], []
    for start in range(0, len(compared), COLUMNS):
        some = compared[start : start + COLUMNS]  # they share the names of their setups
        lines = lines_of([row for _, rows in some for row in rows])
        panels += [(key, rows, lines, key == some[0][0]) for key, rows in some]
        heights.append(0.7 + 0.27 * len(lines))

    def draw(ax, key, rows, lines, first):
        ax.axvline(0, color="#000000", linewidth=0.8)
        for row in rows:
            draw_difference(ax, row, lines[place_of(row).label][kind_of(row)])
        if rows[0].metric not in NOT_RATES:
            low, high = ax.get_xlim()
            ax.set_xlim(max(low, -100), min(high, 100))
        ax.set(title=title_of(key, rows), ylim=(len(lines) - 0.4, -0.6))
        ax.set_yticks(range(len(lines)), lines if first else [])
        grid = [y for of_place in lines.values() for y in of_place.values()]
        across = ax.get_yaxis_transform()
        ax.hlines(grid, 0, 1, "#CCCCCC", linewidth=0.3, transform=across, zorder=0)

    notes = "points of difference on the same items", f"{BARS}, thick if p < 0.05 after Holm"
    return figure_of(panels, draw, runs_of(tables), *notes, heights=heights)


def lines_of(rows):
    """Name of a setup → {kind of result: y}: a line of the grid for each, those of one name close
    together."""
    kinds, order = defaultdict(set), {}
    for row in rows:
        place = place_of(row)
        kinds[place.label].add(kind_of(row))
        order[place.label] = order_of_row(place)
    lines = {}
    for number, name in enumerate(sorted(kinds, key=order.get)):
        present = [kind for kind in KINDS if kind in kinds[name]]
        first = number - 0.25 * (len(present) - 1) / 2
        lines[name] = {kind: first + 0.25 * i for i, kind in enumerate(present)}
    return lines


def place_of(row):
    """The run beside whose label a result is drawn: random heads and the comparison with
    them beside that of retrieval heads. Those of the paper's sampler have a place of their own."""
    run = row.runs[0]
    [sampler] = {one.setup.random_heads for one in (row.others if row.beside_random else row.runs)}
    sampler = None if sampler == "uniform" else sampler
    return run.with_settings(random_heads=sampler)


def draw_difference(ax, row, y):
    kind = kind_of(row)
    look = KINDS[kind]
    versus = row.versus
    if versus.interval:
        width = 2.2 if row.shown else 0.9
        ax.plot(versus.interval, (y, y), color=look["color"], linewidth=width)
    ax.plot(versus.difference, y, markersize=3.6, linestyle="", label=kind, **look)
    if len(row.values) > 1:
        draws = np.array(row.values) - versus.value
        ax.plot(draws, [y] * len(draws), "x", markersize=2.6, color=look["color"])


def kind_of(row):
    setup = row.runs[0].setup
    retrieval, random, difference, others = KINDS
    if row.beside_random:
        return difference
    if setup.random_heads:
        return random
    return retrieval if setup.num_heads else others


# Differences against N


def heads_figure(tables):
    """A panel for each task and model with setups of several N: difference against N, a line per
    setup, random heads dashed."""
    panels, swept = [], {}
    for key, rows in tables.items():
        curves = defaultdict(list)
        for row in rows:
            if row.versus and not row.beside_random and row.runs[0].setup.num_heads:
                curves[row.runs[0].with_settings(num_heads=None).label].append(row)
        curves = {name: points for name, points in curves.items() if len(points) > 1}
        if curves:
            panels.append((key, curves))
            swept[key] = [row for points in curves.values() for row in points]
    names = dict.fromkeys(name for _, curves in panels for name in curves)
    looks = dict(zip(names, zip(itertools.cycle(COLOURS), itertools.cycle("ovDs^P<"))))

    def draw(ax, key, curves):
        ax.axhline(0, color="#000000", linewidth=0.8)
        for number, (name, points) in enumerate(curves.items()):
            colour, marker = looks[name]
            random = points[0].runs[0].setup.random_heads
            x = np.array([row.runs[0].setup.num_heads for row in points], dtype=float)
            x *= 1 + 0.03 * (number - (len(curves) - 1) / 2)  # bars lie side by side
            y = [row.versus.difference for row in points]
            style = {"linestyle": "--", "mfc": "white"} if random else {}
            ax.plot(x, y, color=colour, marker=marker, markersize=4, label=name, **style)
            for place, row in zip(x, points):
                if row.versus.interval:
                    ax.plot((place, place), row.versus.interval, color=colour, linewidth=0.7)
        ax.set_xscale("log")
        ticks = sorted({row.runs[0].setup.num_heads for rows in curves.values() for row in rows})
        ax.set_xticks(ticks, ticks)
        ax.set_xticks([], minor=True)
        ax.set(title=title_of(key, swept[key]), xlabel="heads masked, N", ylabel="difference")

    return figure_of(panels, draw, runs_of(swept), "points of difference to greedy decoding", BARS)


# Answers of the passage and of memory


def memory_figure(tables):
    """For each task and model with memorised answers: a bar of each setup's answers; and, with a
    closed-book run, the largest gains over greedy decoding by the certainty of that run, in the
    colours of the setups' names."""
    panels, heights, shown = [], [], {}
    closed_book = [run for run in runs_of(tables) if run.header.get("closed_book")]
    for key, rows in tables.items():
        rows = [row for row in rows if row.metric == "passage" and not row.beside_random]
        if len(rows) > 1:
            curves = curves_of(rows, closed_book)
            panels += [(draw_answers, key, rows, curves), (draw_gains, curves)]
            heights.append(0.7 + max(1.6, 0.2 * len(rows)))
            shown[key] = rows

    def draw(ax, draw_panel, *panel):
        draw_panel(ax, *panel)

    note = "p closed book: probability of the memorised answer without the passage, quarters of the"
    note += f" items; gain in the passage's answers, of the {len(COLOURS)} setups with the largest,"
    note += " in the colours of their names"
    return figure_of(panels, draw, runs_of(shown), note, heights=heights, columns=2)


def draw_answers(ax, key, rows, curves):
    places = range(len(rows))
    left = np.zeros(len(rows))
    for name, colour in ANSWERS.items():
        shares = np.array([row.value if name == row.metric else row.beside[name] for row in rows])
        ax.barh(places, shares, left=left, color=colour, height=0.7, label=name)
        left += shares
    ax.set_yticks(places, [row.label for row in rows])
    colours = dict(zip(curves, COLOURS))
    for name in ax.get_yticklabels():
        name.set_color(colours.get(name.get_text(), "#000000"))
    ax.set(title=title_of(key, rows), xlim=(0, 100), xlabel="% of the answers")
    ax.invert_yaxis()


def draw_gains(ax, curves):
    if not curves:
        ax.set_axis_off()
        return
    ax.axhline(0, color="#000000", linewidth=0.8)
    for points, colour in zip(curves.values(), COLOURS):
        ax.plot(*points, marker="o", color=colour, markersize=3.6)
    ax.set(xlim=(0, 1), xlabel="p closed book", ylabel="gain, points")


def curves_of(rows, closed_book):
    """{setup: (certainties, gains)} of the setups that gain most over greedy decoding: means of
    quarters of the items, gains in points. closed_book: runs."""
    certainties = {}
    of_rows = rows[0].runs[0].identity
    for run in closed_book:
        if all(run.identity.get(name) == of_rows.get(name) for name in ("model", "fingerprint")):
            for line, question in zip(run.lines, run.questions):
                if (log_p := line.get("memory_log_p")) is not None:
                    certainties[line["id"], question] = np.exp(log_p)
    curves = {}
    compared = [row for row in rows if row.versus]
    for row in sorted(compared, key=lambda row: -row.versus.difference)[: len(COLOURS)]:
        draws, [greedy] = [run.items for run in row.runs], row.others
        points = []
        for key, (question, values) in greedy.items.items():
            certainty = certainties.get((key[0], question))
            if certainty is not None and all(key in items for items in draws):
                share = np.mean([items[key][1]["passage"] for items in draws])
                points.append((certainty, 100 * (share - values["passage"])))
        if points:
            quarters = np.array_split(sorted(points), min(4, len(points)))
            curves[row.label] = np.transpose([quarter.mean(0) for quarter in quarters])
    return curves


FIGURES = {
    "differences": (difference_figure, "differences to greedy decoding on the same items"),
    "heads": (heads_figure, "difference to greedy decoding against the number of masked heads"),
    "memory": (memory_figure, "answers of the passage and of memory, and gain by certainty"),
}


# Head files


def head_maps(files):
    """Figure of the scores of several models by layer and head: copy, and effect beside it.

    files: {path: {measure: scores}}"""

    def draw(ax, name, measure, scores):
        table = np.zeros(np.add(max(scores), 1))  # [L, H]
        table[tuple(np.transpose([*scores]))] = [*scores.values()]
        how = dict(norm=PowerNorm(0.5, 0, 1))
        if measure == "effect":
            how = dict(norm=CenteredNorm(halfrange=abs(table).max()), cmap="PuOr_r")
        image = ax.imshow(table, aspect="auto", origin="lower", **how)
        ax.set(title=f"{name}, {measure}", xlabel="head", ylabel="layer")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        if measure == "effect":  # each model has a scale of its own
            ax.figure.colorbar(image, ax=ax, aspect=30)
        else:
            copies.append((ax, image))

    copies = []
    measures = sorted({measure for maps in files.values() for measure in maps})
    panels = [
        (path.stem, measure, maps[measure]) if measure in maps else None  # an empty place
        for path, maps in files.items()
        for measure in measures
    ]
    columns = len(measures) if len(measures) > 1 else COLUMNS
    note = "score of every head, layer 0 at the bottom"
    figure = figure_of(panels, draw, [], note, columns=columns)
    if copies:
        axes = [ax for ax, _ in copies]
        label = "copy score (colour by its square root)"
        figure.colorbar(copies[-1][1], ax=axes, shrink=0.5, aspect=30, label=label)
    return figure
