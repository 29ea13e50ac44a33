"""What a run has learned, as a picture: reward and accuracy by step, in training and held out.

.venv/bin/python scripts/plot_learning.py outputs/<run> docs/learning-smollm2.png

Several runs are drawn over each other, such as those of several seeds.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, never a window
import matplotlib.pyplot as plt

from torchtitan_rl.observability.sinks import read_metrics

CURVES = {"reward": "reward/all/mean", "accuracy": "accuracy/all/mean"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    arguments = parser.parse_args(argv)
    for run in arguments.runs:
        if not (run / "metrics.jsonl").is_file():
            print(f"error: {run} is no folder of a run: it has no metrics.jsonl", file=sys.stderr)
            return 2
    plot(arguments.runs, arguments.picture)
    print(f"wrote {arguments.picture}")
    return 0


def plot(runs: list[Path], picture: Path) -> None:
    figure, axes = plt.subplots(1, len(CURVES), figsize=(9, 3.2), layout="constrained")
    for number, run in enumerate(runs):
        rows, color = read_metrics(run / "metrics.jsonl"), f"C{number}"
        for axis, (name, key) in zip(axes, CURVES.items(), strict=True):
            sampled = [(row["step"], row[key]) for row in rows if key in row]
            held_out = [(row["step"], row[f"eval/{name}"]) for row in rows if f"eval/{name}" in row]
            axis.plot(
                *zip(*sampled, strict=True), color=color, alpha=0.35, label="sampled, training"
            )
            axis.plot(*zip(*held_out, strict=True), "o-", color=color, label="greedy, held out")
            axis.set(xlabel="step", title=name, ylim=(0, None))
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].legend(handles[:2], labels[:2], frameon=False)
    figure.savefig(picture, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
