"""What people type on the command line: options that several commands have, and values from text."""

from pathlib import Path
from typing import Annotated, Any

import typer

from archspec.errors import ArchspecError
from archspec.schema import Document

SpecArgument = Annotated[str, typer.Argument(help="A preset's name, a spec file, or a draft's folder.")]
TargetOption = Annotated[
    str | None, typer.Option("--target", "-t", help="Model folder, .gguf file, package:NAME or hub name.")
]
FeaturesOption = Annotated[Path, typer.Option("--features", "-f", help="Feature store, made by capture.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU where there is one.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
HoldoutOption = Annotated[float, typer.Option(help="Share of conversations that measures and never trains.")]
LengthOption = Annotated[int, typer.Option("--draft-length", "-k", min=1, help="Tokens drafted a cycle.")]

ProfileOption = Annotated[
    Path | None, typer.Option(help="Times from a cost profile: a file of archspec profile, or one by hand.")
]
AcceleratorOption = Annotated[str | None, typer.Option(help="Times from the roofline of an accelerator: H100-SXM …")]
ServedDtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="Served in, with --accelerator: bfloat16, float32, float16 or float8.")
]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Sequences decoded together; 1 if left out.")]
ContextOption = Annotated[int | None, typer.Option(min=1, help="Tokens in the cache; 512 if left out.")]
LengthsOption = Annotated[
    str | None, typer.Option("--draft-lengths", help="The k that serving may use: 1-8, or one k; 1-8 if left out.")
]


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
