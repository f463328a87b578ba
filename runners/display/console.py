"""What all commands share: how they print, how errors and Ctrl-C end, and the target that an option names."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

from archspec.errors import ArchspecError

if TYPE_CHECKING:
    from archspec.facts import TargetFacts

STOPPED = 130


class Commands(TyperGroup):
    """Turns what users can mend into one message on standard error: exit code 2, or 130 after Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except ArchspecError as error:
            _say(f"error: {error}")
            raise typer.Exit(2) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            _say(f"error: {error.filename or ctx.invoked_subcommand}: {error.strerror or error}")
            raise typer.Exit(2) from None
        except KeyboardInterrupt as stop:
            _say(f"stopped{f'; {stop}' if str(stop) else ''}")
            raise typer.Exit(STOPPED) from None


@contextmanager
def hint(how: str) -> Iterator[None]:
    """Let Ctrl-C say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(how) from None


def facts_of(target: str | None) -> "TargetFacts | None":
    """The dimensions of the model that an option names, if it names one.

    Raises:
        ArchspecError: there is no such model.
    """
    if target is None:
        return None
    from runners.features.target import target_facts

    return target_facts(target)


def make_console(stderr: bool = False) -> Console:
    """On a terminal as wide as it is, elsewhere wide enough that tables do not wrap."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 140
    return console


def show_all(*parts: RenderableType) -> None:
    """Print for people."""
    console = make_console()
    for part in parts:
        console.print(part)


def print_json(data: Any) -> None:
    """Print for programs."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def _say(message: str) -> None:
    typer.echo(message, file=sys.stderr)
