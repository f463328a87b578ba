"""The one exception that users are meant to read, and how its messages are worded."""

from collections.abc import Iterable
from difflib import get_close_matches


class ArchspecError(Exception):
    """Bad input or an unmet need, told in one message: where, which value, which rule, the nearest valid choice.

    The command line prints the message and exits with code 2; it never shows a traceback for this class.
    """


def nearest(value: object, choices: Iterable[object]) -> str:
    """Return `` did you mean 'x'? choose from a, b`` for an error message, best guess first."""
    names = [str(choice) for choice in choices]
    close = get_close_matches(str(value), names, n=1, cutoff=0.5)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}choose from {', '.join(names)}"
