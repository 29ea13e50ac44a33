"""Make a half-installed venv repairable: forget every package whose files are not all there.

pip takes a package as installed when its metadata is there, even if an interrupted run left files
out or cut one short. This compares each package with its RECORD and removes the metadata of the
broken ones, so that the next `pip install` installs them again. Run it with the venv's own python.
"""

import csv
import shutil
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path


def recorded_files(dist_info: Path) -> dict[str, str] | None:
    """Sizes of the package's files by path, from its RECORD; None when there is no whole RECORD."""
    try:
        (dist_info / "METADATA").stat()
        rows = list(csv.reader((dist_info / "RECORD").read_text("utf-8").splitlines()))
        return {path: size for path, _digest, size in rows if not path.endswith(".pyc")}
    except (OSError, ValueError):
        return None


def broken_packages(site: Path) -> list[Path]:
    """The dist-info folders of packages with files missing or of a wrong size."""
    records = {info: recorded_files(info) for info in sorted(site.glob("*.dist-info"))}
    sizes = defaultdict(set)  # two packages may ship the same file: either's size is right
    for files in records.values():
        for path, size in (files or {}).items():
            sizes[path].add(size)

    def is_there(path: str) -> bool:
        file = site / path
        return file.is_file() and ("" in sizes[path] or str(file.stat().st_size) in sizes[path])

    return [info for info, files in records.items() if not files or not all(map(is_there, files))]


def main() -> int:
    """Returns 1 when pip itself is broken: then only a new venv helps."""
    site = Path(sysconfig.get_paths()["purelib"])
    for leftover in site.glob("~*"):  # pip renames what it is about to replace
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    broken = broken_packages(site)
    if not any(site.glob("pip-*.dist-info")) or any(i.name.startswith("pip-") for i in broken):
        return 1
    for info in broken:
        print(
            f"[install] {info.name.removesuffix('.dist-info')} is incomplete; installing it again"
        )
        shutil.rmtree(info)
    return 0


if __name__ == "__main__":
    sys.exit(main())
