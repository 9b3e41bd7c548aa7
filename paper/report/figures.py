"""Figures of the differences to greedy decoding (report DIR --plots OUT) and of head files (report
heads).

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers and dashes
repeat the information. A setup has one look in all panels; what all setups share is said in the
foot, with the runs. Widths are in inches, sizes of letters in points."""

import itertools
import re
import textwrap
from collections import defaultdict
from functools import partial
from operator import attrgetter
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import CenteredNorm, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from decoders.setup import settings_of
from paper.printed import NAMES
from paper.report.results import NOT_RATES, order_of_row, own_interval
from paper.report.tables import heading, numbers_of
from runtime import statistics
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
        "svg.fonttype": "none",  # texts stay texts
        "pdf.fonttype": 42,
    }
)
WIDTH = 7.0
PANEL = 2.2  # at least so wide
NAME = 26  # letters of a setup's name in a line
LETTERS = 17  # in an inch
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #7A5C00 #56B4E9 #E69F00 #882255 #7F7F7F".split()
KINDS = {  # of results → their look, from top to bottom beside one name
    "retrieval heads": {"color": COLOURS[0], "marker": "o"},
    "random heads (crosses: draws)": {"color": COLOURS[1], "marker": "o", "mfc": "white"},
    "retrieval − random heads": {"color": COLOURS[2], "marker": "D"},
    "other methods": {"color": "#555555", "marker": "s"},
}
# What an answer is, from left to right in a bar → its colour
ANSWERS = {"passage": COLOURS[0], "memory": COLOURS[1], "neither": "#BBBBBB", "blank": "#EEEEEE"}
MOST = 6  # setups in a panel of gains
RUN = attrgetter("run")
BARS = "bars: 95 % intervals"
AGAINST = "points against greedy decoding"


def draw_all(tables, folder, format, width):
    """Writes the figures for which there are data. tables: lists of results, as the values of
    `results.short_tables`. Returns [(path, caption)]."""
    pictures = []
    for name, (draw, caption) in FIGURES.items():
        if figure := draw(tables, width):
            pictures.append((save(figure, folder, f"{name}.{format}"), caption))
    return pictures


def save(figure, folder, name):
    """The path of the figure, written into a folder."""
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with named(path):
        figure.savefig(path)
    return path


def figure_of(panels, draw, runs, *notes, width, heights=None, columns=None):
    """A figure of panels (title, *arguments of `draw(axes, …)`), None for an empty place; None
    without panels. heights: of the rows of panels, without their titles."""
    if not panels:
        return None
    columns = columns or columns_of(panels, width)
    rows = -(-len(panels) // columns)
    names, axis = (1.5, 0.15) if heights else (0, 0.5)  # room for setups, and for numbers
    letters = int(LETTERS * ((width - names) / columns - axis))
    titles = [panel and wrapped(panel[0], letters) for panel in panels]
    most = max(title.count("\n") for title in titles if title)
    heights = [height + 0.62 + 0.12 * most for height in heights or [1.5] * rows]
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).flat
    for ax, panel, title in itertools.zip_longest(axes, panels, titles):
        if panel is None:
            ax.set_axis_off()
        else:
            draw(ax, *panel[1:])
            ax.set_title(title)
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
    foot = wrapped(" · ".join([*filter(None, notes), *texts]), int(LETTERS * width))
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=6.5, color="#444444")
    height = sum(heights) + 0.12 * (foot.count("\n") + 1)
    handles = {}
    for ax in figure.axes:
        handles |= zip(*ax.get_legend_handles_labels()[::-1])
    if handles:
        labels = [wrapped(label, int(LETTERS * (width - 0.5))) for label in handles]
        ncols = max(1, int(LETTERS * width / (max(map(len, labels)) + 8)))
        figure.legend(handles.values(), labels, loc="outside upper center", ncols=ncols)
        lines = len(labels) + sum(label.count("\n") for label in labels)
        height += 0.17 * -(-lines // ncols) + 0.1
    figure.set_figheight(height)
    return figure


def columns_of(panels, width):
    return max(1, min(len(panels), int(width / PANEL)))


def wrapped(text, letters):
    """A text in lines of at most so many letters, unless a word is longer, such as "N = 10"."""
    lines = re.sub(r"(?<!,) (?=-?[\d.]+(,|$)|= )|(?<==) ", "\u00a0", text).split("\n")
    wrap = partial(textwrap.fill, width=letters, break_on_hyphens=False, break_long_words=False)
    return "\n".join(map(wrap, lines)).replace("\u00a0", " ")


def runs_of_tables(tables):
    return [run for rows in tables for row in rows for run in row.runs]


def title_of(rows):
    run, metric = rows[0].run, heading(rows[0].metric)
    return f"{NAMES[run.task]}, {metric}, n = {numbers_of(rows)}\n{run.title}"


def names_of(tables, place):
    """(name(run), foot): the label of a run without what all runs have in common, as far as it
    concerns them, such as the file of their heads: this is in the foot.

    place(row): the run that a row is drawn as."""
    facts = defaultdict(dict)  # fact → {label: text}
    for run in (place(row) for rows in tables for row in rows):
        for fact, text in facts_of(run).items():
            facts[fact][run.label] = text
    shared = {}
    for fact, texts in facts.items():
        text, *others = {*texts.values()}
        if text and not others and len(texts) > 1:
            shared[fact] = text

    def name(run):
        words = [text for fact, text in facts_of(run).items() if text and fact not in shared]
        return ", ".join([run.method, *words])

    return name, shared and f"all setups that have it: {', '.join(dict.fromkeys(shared.values()))}"


def facts_of(run):
    """{setting, or other fact that concerns the run: text, as in its label}."""
    setup = run.setup
    facts = dict.fromkeys(settings_of(setup.method, setup.choice, setup.random_heads))
    facts |= setup.words()
    if run.heads:
        facts["heads", run.title] = run.heads
    return facts | {"variant": run.variant}


# A line for each setup


def lines_figure(tables, width, place, draw, xlabel, note):
    """A panel for each task and model, with a line for each setup; panels side by side share them.

    place(row): the run of whose line a row is. draw(axes, row, y) draws the row."""
    name, shared = names_of(tables, place)
    columns = columns_of(tables, width)
    panels, heights = [], []
    for start in range(0, len(tables), columns):
        some = tables[start : start + columns]
        lines = lines_of([(place(row), row) for rows in some for row in rows], name)
        panels += [(title_of(rows), rows, lines, rows is some[0]) for rows in some]
        most = max(wrapped(text, NAME).count("\n") for text in lines)
        heights.append(max(0.27, 0.2 + 0.12 * most) * len(lines))

    def draw_panel(ax, rows, lines, first):
        ax.axvline(0, color="#000000", linewidth=0.8)
        ax.set_xlabel(xlabel)
        for row in rows:
            draw(ax, row, lines[name(place(row))][kind_of(row)])
        if rows[0].metric not in NOT_RATES:
            low, high = ax.get_xlim()
            ax.set_xlim(max(low, -100), min(high, 100))
        ax.set_ylim(len(lines) - 0.4, -0.6)
        ax.set_yticks(range(len(lines)), [wrapped(text, NAME) for text in lines] if first else [])
        grid = [y for of_name in lines.values() for y in of_name.values()]
        across = ax.get_yaxis_transform()
        ax.hlines(grid, 0, 1, "#CCCCCC", linewidth=0.3, transform=across, zorder=0)

    how = dict(width=width, heights=heights)
    return figure_of(panels, draw_panel, runs_of_tables(tables), shared, note, **how)


def lines_of(pairs, name):
    """Name of a setup → {kind of result: y}, close together. pairs: (run, row)."""
    kinds = defaultdict(set)
    for run, row in sorted(pairs, key=lambda pair: order_of_row(pair[0])):
        kinds[name(run)].add(kind_of(row))
    lines = {}
    for number, (of_name, found) in enumerate(kinds.items()):
        present = [kind for kind in KINDS if kind in found]
        first = number - 0.25 * (len(present) - 1) / 2
        lines[of_name] = {kind: first + 0.25 * i for i, kind in enumerate(present)}
    return lines


def kind_of(row):
    setup = row.run.setup
    retrieval, random, difference, others = KINDS
    if row.beside_random:
        return difference
    if setup.random_heads:
        return random
    return retrieval if setup.num_heads else others


def difference_figure(tables, width):
    """The difference of each setup to greedy decoding, and of retrieval heads to random heads."""
    compared = [[row for row in rows if row.versus] for rows in tables]
    compared = [rows for rows in compared if rows]
    note = f"{BARS} on the same items, thick if p < 0.05 after Holm"
    return lines_figure(compared, width, place_of, draw_difference, AGAINST, note)


def place_of(row):
    """Random heads and the comparison with them are drawn beside retrieval heads. Those of the
    paper's sampler have a place of their own."""
    sampler = (row.others[0] if row.beside_random else row.run).setup.random_heads
    return row.run.with_settings(random_heads=None if sampler == "uniform" else sampler)


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


def memory_figure(tables, width):
    """A bar of each setup's answers, with memorised answers."""
    shown, note = memory_tables(tables), f"{BARS} of passage"
    return lines_figure(shown, width, RUN, draw_answers, "% of the answers", note)


def memory_tables(tables):
    shown = []
    for rows in tables:
        rows = [row for row in rows if row.metric == "passage" and not row.beside_random]
        shown += [rows] * (len(rows) > 1)
    return shown


def draw_answers(ax, row, y):
    left = 0
    for name, colour in ANSWERS.items():
        share = row.value if name == row.metric else row.beside[name]
        ax.barh(y, share, left=left, color=colour, height=0.7, label=name)
        left += share
    if len(row.runs) == 1 and (ends := own_interval(row.run, row.metric)):
        ax.plot(ends, (y, y), color="#000000", linewidth=0.8)
    ax.set_xlim(0, 100)


# A curve for each setup


def curves_figure(tables, width, place, points_of, *notes, **axis):
    """A panel for each task and model, with a curve for each setup. Of equal curves each shows,
    since later ones are narrower.

    place(row): the run of whose curve a row is. points_of(rows): pairs of a row and a point (x, y,
    interval or None). axis: of x."""
    name, shared = names_of(tables, place)
    panels = []
    for rows in tables:
        curves = defaultdict(list)
        for row, point in points_of(rows):
            curves[name(place(row))].append(point)
        if curves:
            panels.append((title_of(rows), curves))
    names = dict.fromkeys(name for _, curves in panels for name in curves)
    looks = dict(zip(names, zip(itertools.cycle(COLOURS), itertools.cycle("ovDs^P<"))))

    def draw(ax, curves):
        ax.axhline(0, color="#000000", linewidth=0.8)
        for number, (name, points) in enumerate(curves.items()):
            colour, marker = looks[name]
            narrow = number / len(curves)
            x, y, intervals = zip(*points)
            style = dict(color=colour, marker=marker, label=name, clip_on=False)
            if "random" in name:
                style |= dict(linestyle="--", mfc="white")
            side = 1.5 / 72 * (number - (len(curves) - 1) / 2)  # bars lie side by side
            at = ax.transData + ScaledTranslation(side, 0, ax.figure.dpi_scale_trans)
            style |= dict(linewidth=2.1 - 1.4 * narrow, markersize=5 - 2 * narrow)
            lines = ax.plot(x, y, **style)
            for place, ends in zip(x, intervals):
                if ends:
                    lines += ax.plot((place,) * 2, ends, color=colour, linewidth=0.7, clip_on=False)
            for line in lines:
                line.set_transform(at)
        ax.set(ylabel=AGAINST, **axis)
        if axis.get("xscale") == "log":
            ticks = sorted({x for points in curves.values() for x, *_ in points})
            ax.set_xticks(ticks, ticks)
            ax.set_xticks([], minor=True)

    return figure_of(panels, draw, runs_of_tables(tables), shared, *notes, width=width)


def heads_figure(tables, width):
    """The difference to greedy decoding against N, of setups of several N."""

    def place(row):
        return row.run.with_settings(num_heads=None)

    swept = []
    for rows in tables:
        curves = defaultdict(list)
        for row in rows:
            if row.versus and not row.beside_random and row.run.setup.num_heads:
                curves[place(row).label].append(row)
        several = [row for of_setup in curves.values() if len(of_setup) > 1 for row in of_setup]
        swept += [several] * bool(several)

    def points_of(rows):
        for row in rows:
            yield row, (row.run.setup.num_heads, row.versus.difference, row.versus.interval)

    axis = dict(xscale="log", xlabel="heads masked, N")
    return curves_figure(swept, width, place, points_of, BARS, **axis)


def certainty_figure(tables, width):
    """The largest gains in the passage's answers by the probability of the memorised answer in the
    closed-book run: means of quarters of the items."""
    certainties = defaultdict(dict)  # model → item → p
    for run in runs_of_tables(tables):
        for line, question in zip(run.lines, run.questions):
            if "memory_log_p" in line:  # closed book
                item = line["id"], question
                certainties[model_of(run)][item] = np.exp(line["memory_log_p"])

    def points_of(rows):
        compared = [row for row in rows if row.versus]
        for row in sorted(compared, key=lambda row: -row.versus.difference)[:MOST]:
            for point in quarters_of(row, certainties[model_of(row.run)]):
                yield row, point

    note = f"p: a quarter of the items at each point; the {MOST} setups with the largest gain"
    axis = dict(xlim=(0, 1), xlabel="p of memory, closed book")
    return curves_figure(memory_tables(tables), width, RUN, points_of, note, BARS, **axis)


def model_of(run):
    return run.identity["model"], str(run.identity.get("fingerprint"))


def quarters_of(row, certainties):
    """[(certainty, gain, interval)]: means of quarters of the items whose certainty is known; the
    gain is that over greedy decoding, in points."""
    draws, [greedy] = [run.items for run in row.runs], row.others
    points = []
    for key, (question, values) in greedy.items.items():
        certainty = certainties.get((key[0], question))
        if certainty is not None and all(key in items for items in draws):
            share = np.mean([items[key][1]["passage"] for items in draws])
            points.append((certainty, 100 * (share - values["passage"]), question))
    points.sort()
    quarters = np.array_split(range(len(points)), 4)
    return [mean_of([points[i] for i in quarter]) for quarter in quarters if len(quarter)]


def mean_of(points):
    """(mean certainty, mean gain, its interval) of points (certainty, gain, question)."""
    certainties, gains, questions = zip(*points)
    means = statistics.averages([[(gains, np.ones(len(gains)))]], questions)[:, 0]
    return np.mean(certainties), means[0], statistics.interval(means)


FIGURES = {
    "differences": (difference_figure, "differences to greedy decoding on the same items"),
    "heads": (heads_figure, "difference to greedy decoding against the number of masked heads"),
    "memory": (memory_figure, "answers of the passage and of memory"),
    "certainty": (certainty_figure, "gain over greedy decoding by the certainty of memory"),
}


# Head files


def head_maps(files, width=WIDTH):
    """Figure of the scores of several models by layer and head: copy, and effect beside it.

    files: {path: {measure: scores}}"""

    def draw(ax, measure, scores):
        table = np.zeros(np.add(max(scores), 1))  # [L, H]
        table[tuple(np.transpose([*scores]))] = [*scores.values()]
        how = dict(norm=PowerNorm(0.5, 0, 1))
        if measure == "effect":
            how = dict(norm=CenteredNorm(halfrange=abs(table).max()), cmap="PuOr_r")
        image = ax.imshow(table, aspect="auto", origin="lower", **how)
        ax.set(xlabel="head", ylabel="layer")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        if measure == "effect":  # each model has a scale of its own
            ax.figure.colorbar(image, ax=ax, aspect=30)
        else:
            copies.append((ax, image))

    copies = []
    known = {measure for scores in files.values() for measure in scores}
    measures = [measure for measure in ("copy", "effect") if measure in known]
    panels = []
    for path, scores in files.items():
        for measure in measures:
            panel = f"{path.stem}, {measure}", measure, scores.get(measure)
            panels.append(panel if measure in scores else None)  # None: an empty place
    columns = len(measures) if len(measures) > 1 else None
    note = "score of every head, layer 0 at the bottom"
    figure = figure_of(panels, draw, [], note, width=width, columns=columns)
    if copies:
        axes = [ax for ax, _ in copies]
        label = "copy score (colour by its square root)"
        figure.colorbar(copies[-1][1], ax=axes, shrink=0.5, aspect=30, label=label)
    return figure
