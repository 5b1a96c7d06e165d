"""What is done before the script starts; imports nothing but the standard library and xxhash."""

from __future__ import annotations

from ttprun.capture.effects import file_answers, file_system, origins


def listen() -> None:
    """Keep what the script draws, and is answered by the file system; there is no recorder yet."""
    origins.listen()
    file_answers.listen()
    file_system.watch()
