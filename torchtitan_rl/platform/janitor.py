"""Folders that are removed when the process that made them ends, however it ends."""

import shutil
import subprocess
from pathlib import Path

JANITOR = "torchtitan_rl-janitor"


class Janitor:
    """Removes a folder when it is closed, when nobody has it any more, or when this process ends,
    also by SIGKILL: our end of a pipe closes then."""

    # A grandchild does the work, so that it survives when all children of this process are killed.
    # It reads from descriptor 3: a shell gives background commands no standard input.
    _SCRIPT = 'exec 3<&0; { cat <&3 > /dev/null; rm -rf -- "$1"; } &'

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["sh", "-c", self._SCRIPT, JANITOR, str(folder)]
        # In a new session, so that Ctrl-C in the terminal does not reach it.
        shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._pipe = shell.stdin
        shell.wait()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        assert self._pipe is not None
        self._pipe.close()
