"""What people type on the command line, as values."""

from typing import Any

import typer

from archspec.errors import ArchspecError
from archspec.schema import Document


def count(text: str | int) -> int:
    """A count as people write it: 20000 or 20e3. A default comes as the number it is."""
    try:
        number = float(str(text).replace("_", ""))
    except ValueError:
        number = -1.0
    if number < 1 or number != int(number):
        raise typer.BadParameter(f"{text!r} is no count; write a whole number such as 20000 or 20e3")
    return int(number)


def setting(text: str) -> tuple[str, Any]:
    """``learning_rate=1e-3`` as a name and a value, the value as a search file would read it.

    Raises:
        ArchspecError: there is no ``=``, or nothing after it.
    """
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise ArchspecError(f"--set {text}: write NAME=VALUE, for example --set warmup=0.1")
    return name, Document.parse(value, f"--set {text}").data
