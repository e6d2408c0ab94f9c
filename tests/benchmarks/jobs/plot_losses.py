"""Plot the loss of a run that lost half its hosts beside that of an undisturbed run.

    plot_losses.py DATA.json PICTURE.png

DATA.json is a `LossCurve` of `benchmarks.step.loss_curve`.
"""

import sys
from pathlib import Path

import matplotlib as mpl
import msgspec
from matplotlib.figure import Figure

from tests.benchmarks.step.loss_curve import LossCurve

GREY, BLUE, RED = "#b8bec9", "#1f4e9c", "#c0392b"


def draw(curve: LossCurve) -> Figure:
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    steps = range(1, len(curve.losses) + 1)
    top.plot(steps, curve.undisturbed, color=GREY, linewidth=5, label="undisturbed, one host")
    top.plot(steps, curve.losses, color=BLUE, linewidth=1.2, label="4 hosts, of which half are killed")
    fewer = [number < max(curve.hosts) for number in curve.hosts]
    for axes in (top, bottom):
        axes.fill_between(
            steps, 0, 1, where=fewer, transform=axes.get_xaxis_transform(), color=RED, alpha=0.1
        )
    what = "equal bit for bit" if curve.equal else "NOT equal"
    top.set_title(f"the same batches on any hosts; the final weights are {what}")
    top.set_ylabel("loss, nats a byte")
    top.legend(frameon=False)
    bottom.step(steps, curve.hosts, color=RED, where="mid")
    bottom.set_ylim(0, max(curve.hosts) + 0.5)
    bottom.set_yticks(range(0, max(curve.hosts) + 1, 2))
    bottom.set_ylabel("hosts")
    bottom.set_xlabel("step")
    return figure


def main() -> None:
    data, picture = map(Path, sys.argv[1:])
    draw(msgspec.json.decode(data.read_bytes(), type=LossCurve)).savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
