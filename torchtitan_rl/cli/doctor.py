"""`torchtitan-rl doctor`: whether this machine can train, and what to do where it cannot."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from torchtitan_rl.platform.doctor import Finding, diagnose
from torchtitan_rl.platform.machine import examine


def main(argv: Sequence[str], *, prog: str) -> int:
    """Print a line for each finding; returns 1 if a run would fail."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--folder",
        action="append",
        help="a folder that runs are to write to, may be given several times (default: outputs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    machine = examine(arguments.folder or ["outputs"])
    findings = diagnose(machine)
    failed = any(finding.status == "error" for finding in findings)
    if arguments.json:
        used = "cuda" if machine.uses_gpus else "cpu"
        print(
            json.dumps({"ok": not failed, "platform": used, "findings": [*map(asdict, findings)]})
        )
    else:
        print("\n".join(map(line, findings)))
    return int(failed)


def line(finding: Finding) -> str:
    """A finding as a line.

    Example:
        >>> line(Finding("headers", "ok", "Python.h"))
        'ok       headers     Python.h'
    """
    return f"{finding.status:9}{finding.what:12}{finding.text}"
