"""Plot committed steps over time under the same failures, and throughput by failure rate.

    plot_resilience.py DATA.json PICTURE.png

DATA.json is a `ResiliencePlot` of `benchmarks.resilience.plot_data`. The script writes an SVG beside the PNG.
"""

import sys
from pathlib import Path

import matplotlib as mpl
import msgspec
from matplotlib.figure import Figure

from tests.benchmarks.resilience.plot_data import ResiliencePlot

COLORS = ("#1f4e9c", "#5fa8d3", "#c0392b", "#d98e04", "#7f8c8d", "#4a4a4a")


def draw(picture: ResiliencePlot) -> Figure:
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    colors = {rates.system: COLORS[n % len(COLORS)] for n, rates in enumerate(picture.rates)}
    for line in picture.lines:
        left.step(line.at_s, line.steps, where="post", color=colors[line.system], label=line.system)
        left.plot(line.struck_s, line.struck_steps, "x", color=colors[line.system], markersize=8, mew=2)
    left.set_title(f"the same failures (x: a worker is killed), one in {picture.failure_every} steps")
    left.set_xlabel("seconds")
    left.set_ylabel("committed steps")
    for rates in picture.rates:
        right.plot(
            rates.failure_every, rates.tokens_per_s, "o-", color=colors[rates.system], label=rates.system
        )
    right.set_xscale("log")
    ticks = sorted({every for rates in picture.rates for every in rates.failure_every})
    right.set_xticks(ticks, [str(every) for every in ticks])
    right.minorticks_off()
    right.set_ylim(bottom=0)
    right.set_title("effective throughput")
    right.set_xlabel("steps between two failures")
    right.set_ylabel("tokens/s and living device")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def main() -> None:
    data, path = map(Path, sys.argv[1:])
    figure = draw(msgspec.json.decode(data.read_bytes(), type=ResiliencePlot))
    figure.savefig(path, dpi=150)
    figure.savefig(path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
