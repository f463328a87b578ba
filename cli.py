"""The command line; ``runners.commands`` has the commands."""

import typer

from runners.commands import drafts, features, searches, specs, speed
from runners.display.console import Commands

app = typer.Typer(
    name="archspec",
    cls=Commands,
    help="Find the best draft model architecture for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (specs, features, speed, searches, drafts):
    app.add_typer(group.app)


def main() -> None:
    """Run the program."""
    app()


if __name__ == "__main__":
    main()
