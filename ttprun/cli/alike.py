"""A command's output, which may lack characters, a reader or room. Begin with `CommandOutput` and `ALIKE`.

`ALIKE` writes what looks alike in place of our dots, dashes and arrows where a stream's encoding lacks them.
"""

from __future__ import annotations

import codecs
import io
from typing import Any, TextIO

PIPE_CLOSED = 141  # 128 + SIGPIPE, as the shell's own commands end

ALIKE = "ttprun.alike"  # an error handler of encodings
_LOOK_ALIKE = {"·": "-", "–": "-", "—": "-", "×": "x", "→": "->", "←": "<-", "…": "...", "≤": "<=", "≥": ">=", "µ": "u"}
_LOOK_ALIKE |= zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True)


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Write what looks alike where an encoding lacks a character, else its number."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    shown = (
        _LOOK_ALIKE.get(character) or character.encode("ascii", "backslashreplace").decode() for character in lacking
    )
    return "".join(shown), error.end


codecs.register_error(ALIKE, _replace)


class CommandOutput(io.FileIO):
    """The file below stdout: a command whose output cannot be written ends at once.

    By SystemExit, which neither a library's answer to a closed pipe nor our own answer to a bug of ours takes up.
    """

    ends_the_command = True  # until ranks are about to be started: a job goes on without a reader

    def write(self, data: Any) -> int:
        """Write; after a failure nothing more, so that the end of Python does not fail as well."""
        try:
            return super().write(data)
        except OSError as error:
            if not self.ends_the_command:
                raise
            self.write = len  # type: ignore[method-assign,assignment]
            raise SystemExit(
                PIPE_CLOSED
                if isinstance(error, BrokenPipeError)
                else f"ttprun: error: the output cannot be written ({error.strerror})"
            ) from None


def through(stream: TextIO) -> TextIO:
    """A stream that writes to the same file, by way of `CommandOutput`."""
    return io.TextIOWrapper(
        io.BufferedWriter(CommandOutput(stream.fileno(), "w", closefd=False)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.isatty(),
        write_through=bool(getattr(stream, "write_through", False)),
    )
