"""A process that does as its arguments say.

print TEXT; spawn, a child of its own that waits; ignore, SIGTERM; note NAME COUNT FILE, to end at that
many SIGTERMs and say so in the file; exit STATUS; wait.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> None:
    words = iter(sys.argv[1:])
    for word in words:
        match word:
            case "print":
                print(next(words), flush=True)
            case "spawn":
                subprocess.Popen([sys.executable, __file__, "ignore", "wait"])
            case "ignore":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "note":
                note(next(words), int(next(words)), Path(next(words)))
            case "exit":
                sys.exit(int(next(words)))
            case "wait":
                print("waiting", flush=True)
                while True:
                    signal.pause()


def note(name: str, count: int, path: Path) -> None:
    left = count

    def arrived(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            with path.open("a") as notes:
                notes.write(f"{name} ended at {count}\n")
            os._exit(0)

    signal.signal(signal.SIGTERM, arrived)


main()
