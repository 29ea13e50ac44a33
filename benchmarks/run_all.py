"""Run every benchmark, keep its JSON lines under outputs/benchmarks/, and show a table.

python benchmarks/run_all.py            all but those in ONLY_NAMED: an hour
python benchmarks/run_all.py overhead   those whose name contains a word
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from rich.table import Table

from torchtitan_rl.observability.console import console

HERE = Path(__file__).parent
NOT_BENCHMARKS = {
    *("run_all.py", "common.py", "bare_engine.py", "weight_movers.py"),
    "relay_chain.py",
    *("peer_work.py", "peer_ours.py", "peer_theirs.py", "profiled.py"),
}
ONLY_NAMED = {"ablation.py", "peer_trl.py", "hosts_survival.py"}
"""Benchmarks that run only if they are named: they take long, or install something."""


def main(words: list[str]) -> int:
    scripts = [
        script
        for script in sorted(HERE.glob("*.py"))
        if script.name not in NOT_BENCHMARKS
        and (any(word in script.stem for word in words) if words else script.name not in ONLY_NAMED)
    ]
    folder = Path("outputs/benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    failed = []
    for script in scripts:
        console.print(f"[bold]{script.stem}[/]")
        run = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
        with file.open("a") as lines:
            lines.write(run.stdout)
        if run.returncode:
            failed.append(script.stem)
    show(file)
    if failed:
        console.print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def show(file: Path) -> None:
    table = Table(title=str(file), title_justify="left")
    for column in ("benchmark", "metric", "case", "value"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for line in file.read_text().splitlines():
        row = json.loads(line)
        table.add_row(row["benchmark"], row["metric"], row["case"], f"{row['value']:.4g}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
