"""Commands on one draft: train, eval, export, import, serve-check."""

from pathlib import Path
from typing import Annotated, Any

import typer

from archspec.errors import ArchspecError
from archspec.schema import Document
from runners.display.console import hint, make_console, print_json, show_all
from runners.display.options import (
    AcceleratorOption,
    BatchOption,
    ContextOption,
    DeviceOption,
    FeaturesOption,
    HoldoutOption,
    JsonOption,
    LengthOption,
    LengthsOption,
    ProfileOption,
    ServedDtypeOption,
    SpecArgument,
    TargetOption,
    TrustOption,
    count,
    setting,
)

app = typer.Typer()


@app.command(epilog="Example:  archspec train eagle3 --features runs/features --out runs/eagle3 --tokens 100e3")
def train(
    spec: SpecArgument,
    features: FeaturesOption,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for checkpoint, metrics and draft.")],
    tokens: Annotated[int, typer.Option(help="Budget, in tokens of conversations.", parser=count)] = 100_000,
    rungs: Annotated[str, typer.Option(help="Several budgets, to measure on the way: 20e3,60e3,180e3.")] = "",
    seed: int = 0,
    holdout: HoldoutOption = 0.1,
    draft_length: LengthOption = 4,
    ttt_steps: Annotated[int, typer.Option(min=1, help="Draft steps that training unrolls.")] = 4,
    batch_tokens: Annotated[int, typer.Option(help="Tokens in one optimiser step.", parser=count)] = 2048,
    learning_rate: Annotated[float, typer.Option(help="Its peak.")] = 1e-3,
    device: DeviceOption = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    others: Annotated[list[str] | None, typer.Option("--set", help="Any other training setting, NAME=VALUE.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train one draft on a feature store and measure it. The same command goes on from its own checkpoint."""
    from archspec.presets import load_document
    from runners.display import tables
    from runners.features.store import FeatureStore
    from runners.progress import Meter
    from runners.training import single

    settings: dict[str, Any] = {"ttt_steps": ttt_steps, "batch_tokens": batch_tokens, "learning_rate": learning_rate}
    settings |= {"device": device, "threads": threads} | dict(map(setting, others or ()))
    budgets = [count(text) for text in rungs.split(",")] if rungs else [tokens]
    how = single.Training.of(budgets, settings, draft_length, holdout, seed)
    task = single.begin_training(load_document(spec), FeatureStore.open(features), out, how)
    console, results = make_console(stderr=as_json), []
    with hint("the same command goes on from the last checkpoint"), Meter(console, "trained tokens") as meter:
        for result in single.run_rungs(task, single.shown(meter, budgets[-1])):
            results.append(result.as_dict())
            if not as_json:
                console.print(
                    f"{result.tokens:,} tokens, loss {result.loss:.3f}, {result.tokens_per_second:,.0f} tokens/s"
                )
                console.print(tables.acceptance_table(result.acceptance), "")
    return print_json(results) if as_json else typer.echo(f"draft: {single.find_draft(out)}")


@app.command(name="eval", epilog="Example:  archspec eval runs/eagle3 --features runs/features --decode 8")
def evaluate(
    draft: Annotated[Path, typer.Argument(help="A draft's folder, a trial's, or a run's (its best draft).")],
    features: FeaturesOption,
    target: TargetOption = None,
    draft_length: Annotated[
        int | None, typer.Option("--draft-length", "-k", min=1, help="Tokens drafted a cycle; 4, or the fastest k.")
    ] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="The draft samples instead of taking its argmax.")] = False,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of serving; by default the text's.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Of serving; by default the text's.")] = None,
    holdout: Annotated[
        float | None, typer.Option(help="Share of conversations to measure on; by default those held out in training.")
    ] = None,
    decode: Annotated[int, typer.Option(min=0, help="Also decode so many held-out conversations for real.")] = 0,
    tree: Annotated[
        str | None,
        typer.Option(
            help="Decode with a draft tree too: 4x2x1 (children at each depth), or 4,4,16 (steps, topk, tokens)."
        ),
    ] = None,
    profile: ProfileOption = None,
    accelerator: AcceleratorOption = None,
    dtype: ServedDtypeOption = None,
    batch: BatchOption = None,
    context: ContextOption = None,
    draft_lengths: LengthsOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure a draft's acceptance, and with times its speed-up; --decode checks both against real decoding."""
    from runners.commands.evaluation import Evaluation
    from runners.commands.times import speed_settings
    from runners.training.settings import LONGEST, EvalSettings, TreeSettings

    shape = None if tree is None else TreeSettings.parse(tree)
    if shape is not None and not decode:
        raise ArchspecError(f"--tree {tree}: a tree is measured by decoding; add --decode 8")
    use: dict[str, Any] = {"dtype": dtype, "batch": batch, "context": context, "draft_lengths": draft_lengths}
    speed = speed_settings(profile, accelerator, **use, longest=max(LONGEST, draft_length or 0))
    kind = "sampled" if sampled else "greedy"
    written = {"draft_length": draft_length or 4, "draft": kind, "temperature": temperature, "top_p": top_p}
    settings = Document(written, "eval").validate(EvalSettings)
    asked = Evaluation(draft, features, settings, holdout, device, speed, decode, target, draft_length, shape)
    evaluated = asked.run()
    return print_json(evaluated.as_dict()) if as_json else show_all(*evaluated.shown())


@app.command(epilog="Example:  archspec export runs/first --features runs/features --out drafts/eagle3")
def export(
    draft: Annotated[Path, typer.Argument(help="A draft's folder, a trial's, or a run's (its best draft).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A new folder for config.json and model.safetensors.")],
    target: TargetOption = None,
    features: Annotated[Path | None, typer.Option("--features", "-f", help="A store of the same target.")] = None,
    form: Annotated[str, typer.Option("--format", help="vllm, sglang, specforge, speculators or eagle1.")] = "vllm",
    trust_remote_code: TrustOption = False,
) -> None:
    """Write a trained draft in another project's format; the frozen tensors come from its target or a store of it."""
    from archspec.formats import format_named
    from runners.training.exchange import export_draft

    if (target is None) == (features is None):
        raise ArchspecError("give the draft's target by --target, or a feature store of it by --features")
    export_draft(draft, out, format_named(form).name, target, features, trust_remote_code)
    typer.echo(f"{out}: config.json and model.safetensors in the format {form}")


@app.command(
    name="import", epilog="Example:  archspec import EAGLE3-LLaMA3.1-8B -t models/llama --out drafts/published"
)
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with another project's config.json and weights.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A new folder for spec and weights.")],
    target: TargetOption = None,
    features: Annotated[Path | None, typer.Option("--features", "-f", help="A store of the draft's target.")] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="vllm, sglang, specforge, speculators or eagle1; found by itself.")
    ] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Turn a checkpoint of SpecForge, SGLang, vLLM, speculators or EAGLE into a draft that can be measured here."""
    from runners.training.exchange import import_draft

    if (target is None) == (features is None):
        raise ArchspecError("give the draft's target by --target, or a feature store of it by --features")
    draft, guesses = import_draft(checkpoint, out, form, target, features, trust_remote_code)
    spec = draft.spec
    layers, ids = len(spec.layers), ", ".join(map(str, spec.inputs.aux_layers))
    size = f"{layers} layer{'s' * (layers > 1)}, head over {spec.head.vocab_size} tokens"
    typer.echo(f"{out}: {spec.name}, {spec.hash}; aux layers {ids}; {size}")
    typer.echo(f"{out}: embedding {spec.embedding}, head weights {spec.head.weights}, fed back {spec.feedback}")
    for guess in guesses:
        typer.echo(f"note: {guess}")


@app.command(name="serve-check", epilog="Example:  archspec serve-check runs/first --features runs/features")
def serve_check(
    draft: Annotated[Path, typer.Argument(help="A draft's folder, a trial's, or a run's (its best draft).")],
    features: FeaturesOption,
    target: TargetOption = None,
    engine: Annotated[str, typer.Option(help="vllm.")] = "vllm",
    engine_python: Annotated[
        Path | None, typer.Option(help="Python of the engine's environment; .venv-engine/bin/python if left out.")
    ] = None,
    draft_length: LengthOption = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out conversations to answer.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 64,
    served: Annotated[Path | None, typer.Option(help="Exported draft to serve in place of a fresh export.")] = None,
    work: Annotated[Path, typer.Option(help="Keeps export, target, answers and logs.")] = Path("runs/serve-check"),
    tolerance: Annotated[float, typer.Option(help="Share by which figures may differ in any case.")] = 0.01,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Serve a draft in a real engine and hold its acceptance counters against ours; exit code 1 if they disagree."""
    from runners.display.serving import serve_report
    from runners.serving.serve_check import ServeOptions
    from runners.serving.serve_check import serve_check as run_check

    check = run_check(
        draft,
        features,
        ServeOptions(draft_length, prompts, max_new_tokens, tolerance),
        target=target,
        engine=engine,
        engine_python=engine_python,
        served=served,
        work=work,
        trust_remote_code=trust_remote_code,
        report=make_console(stderr=True).print,
    )
    print_json(check.as_dict()) if as_json else show_all(serve_report(check))
    if not check.agrees:
        raise typer.Exit(1)
