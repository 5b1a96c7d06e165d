"""What the script does to the outside: files, output, and what it takes from there (time, entropy).

Imports neither torch nor numpy: `listen` is called before the script starts.
"""

from __future__ import annotations

from ttprun.capture.effects import file_answers, file_system, origins


def listen() -> None:
    """Keep what the script draws, and is answered by the file system; there is no recorder yet."""
    origins.listen()
    file_answers.listen()
    file_system.watch()
