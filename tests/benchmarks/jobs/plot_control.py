"""Plot the figures of the control benchmark by the number of hosts.

    plot_control.py DATA.json PICTURE.png

DATA.json is a `PlotData` of `benchmarks.control.figures`.
"""

import sys
from pathlib import Path

import matplotlib as mpl
import msgspec
from matplotlib.figure import Figure

from tests.benchmarks.control.figures import PlotData

WIDTH, HEIGHT = 4.2, 3.6
"""Of a panel, in inches."""


def draw(data: PlotData) -> Figure:
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(WIDTH * len(data.panels), HEIGHT), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(data.panels), squeeze=False)[0], data.panels, strict=True):
        for name, found in panel.lines.items():
            sizes = [size for size, _ in found]
            axes.plot(sizes, [each.median for _, each in found], marker="o", label=name)
            axes.fill_between(
                sizes, [each.low for _, each in found], [each.high for _, each in found], alpha=0.15
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("hosts")
        axes.set_title(panel.title)
        axes.legend(frameon=False)
    return figure


def main() -> None:
    data, picture = map(Path, sys.argv[1:])
    draw(msgspec.json.decode(data.read_bytes(), type=PlotData)).savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
