"""Commands that make feature stores: capture, adopt."""

from pathlib import Path
from typing import Annotated

import typer

from archspec.errors import ArchspecError
from runners.display.console import hint, make_console
from runners.display.options import DeviceOption, TrustOption, count

app = typer.Typer()


@app.command(
    epilog="Example:  archspec capture -t models/m --generate prompts.jsonl --responses own.jsonl --out runs/features"
)
def capture(
    target: Annotated[str, typer.Option("--target", "-t", help="Model folder, .gguf file, package:NAME or hub name.")],
    conversations: Annotated[list[Path] | None, typer.Option("--conversations", "-c", help="JSONL to capture.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Feature store to make or reuse.")] = None,
    generate: Annotated[list[Path] | None, typer.Option("--generate", help="JSONL of prompts to answer.")] = None,
    responses: Annotated[Path | None, typer.Option("--responses", help="Where the target's answers go.")] = None,
    layers: Annotated[str, typer.Option(help="Layer ids, or low, middle, high, last.")] = "low,middle,high",
    dtype: Annotated[str, typer.Option(help="Of the stored states: float32 or bfloat16.")] = "float32",
    target_dtype: Annotated[str, typer.Option(help="That the target runs in.")] = "float32",
    max_length: Annotated[int, typer.Option(help="Longest conversation, in tokens.")] = 1024,
    batch_tokens: Annotated[int, typer.Option(help="Tokens in one forward.", parser=count)] = 4096,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens with this probability together.")
    ] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers written at once.")] = 32,
    seed: int = 0,
    workers: Annotated[int, typer.Option(min=1, help="More than one share the work on a Ray cluster.")] = 1,
    address: Annotated[str | None, typer.Option(help="Standing Ray cluster, HOST:PORT or auto.")] = None,
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Let the target answer prompts (--generate), and store its hidden states over conversations (--out)."""
    from runners.features.texts import capture_files, generate_file

    if bool(generate) != (responses is not None):
        raise ArchspecError("--generate and --responses belong together: the prompts, and where their answers go")
    if not generate and not (conversations and out):
        raise ArchspecError("nothing to do: give --conversations and --out, or --generate and --responses")
    if conversations and out is None:
        raise ArchspecError("--conversations needs --out, the folder of the feature store")
    from runners.features.target import load_target
    from runners.training.device import pick_device

    console, shared = make_console(), workers > 1 or address is not None
    loaded = load_target(target, target_dtype, "cpu" if shared else pick_device(device), trust_remote_code)
    with hint("the same command goes on where it stopped"):
        helpers = None
        if shared:
            from runners.search.search_file import TargetSettings
            from runners.search.session import cluster_workers

            settings = {
                "model": target,
                "dtype": target_dtype,
                "device": device,
                "trust_remote_code": trust_remote_code,
            }
            helpers = cluster_workers(address, TargetSettings.model_validate(settings), workers, console.print)
        if generate and responses is not None:
            options = (max_new_tokens, temperature, batch_size, seed, console, helpers, top_p)
            generate_file(loaded, generate, responses, *options)
        if out is not None:
            texts = [*(conversations or []), *([responses] if responses else [])]
            capture_files(loaded, texts, layers.split(","), out, dtype, max_length, batch_tokens, console, helpers)


@app.command(
    epilog="Example:  archspec adopt dumps/llama-8b -t models/llama-8b --layers low,middle,high --out runs/features"
)
def adopt(
    dump: Annotated[Path, typer.Argument(help="Folder of hidden states that SpecForge or speculators wrote.")],
    target: Annotated[str, typer.Option("--target", "-t", help="Model that the states are of, as for capture.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Feature store to make or reuse.")],
    layers: Annotated[
        str, typer.Option(help="Ids of the dump's aux layers, counted from 1, or words.")
    ] = "low,middle,high",
    kind: Annotated[str | None, typer.Option(help="specforge or speculators; found by itself.")] = None,
    vocabulary: Annotated[Path | None, typer.Option(help="File of a draft vocabulary (d2t, t2d) to keep.")] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy the states instead of reading them where they are.")
    ] = False,
    own_temperature: Annotated[float | None, typer.Option(help="The target wrote the text at this one.")] = None,
    target_dtype: Annotated[str, typer.Option(help="That the target runs in.")] = "float32",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Make a feature store of another project's offline hidden states; the target proves which layers they are."""
    from runners.features.adopt import adopt_dump
    from runners.features.target import load_target
    from runners.training.device import pick_device

    loaded = load_target(target, target_dtype, pick_device(device), trust_remote_code)
    with hint("the same command begins anew"):
        adopt_dump(loaded, dump, layers.split(","), out, make_console(), kind, vocabulary, copy, own_temperature)
