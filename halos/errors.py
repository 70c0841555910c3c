"""What goes wrong for reasons that are not ours, and the exit code that each ends with."""

from __future__ import annotations

from enum import IntEnum


class UserError(ValueError):
    """A mistake that the user can put right.

    The text is one sentence: the field or file, its value, and what was expected instead.
    """


class ExitCode(IntEnum):
    """How a ``halos`` command ends. ``help`` is what the command line says about it."""

    help: str

    def __new__(cls, code: int, text: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.help = text
        return member

    DONE = 0, "done; also a run that Ctrl-C stopped and saved"
    BUG = 1, "a fault of halos itself, with a traceback to report"
    USER = 2, "a mistake in the command, the specification or a file, named in one sentence"
    INTERRUPTED = 130, "interrupted before there was anything to save"


class Interrupted(Exception):  # noqa: N818  nothing went wrong
    """A round in training was told to stop; it can be done again from its start."""
