"""``archspec eval`` as a user meets it: lengths and speed-ups for every k, serving temperature, top-p, draft trees."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from archspec.weights import save_draft
from runners.features.store import FeatureStore
from runners.provenance import hardware
from tests.commands import World, answered, at, refused
from tests.runners.drafts import single_thread, tiny_spec, trained_draft
from tests.test_docs import keys, page, section


@pytest.fixture(scope="module")
def command(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    single_thread()
    store = FeatureStore.open(world.features)
    folder = tmp_path_factory.mktemp("draft") / "draft"
    save_draft(trained_draft(store, tiny_spec(store.facts, changes={"inputs.aux_layers": [2, 4, 5]})), folder)
    return "eval", folder, "-f", world.features, "--holdout", 0.1


def record(*words: object) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(answered(*words, "--json"))
    return told


def test_lengths_are_told_for_every_k_to_eight(command: tuple[Any, ...]) -> None:
    lines = answered(*command, "-k", 2).splitlines()
    rows = [line.split() for line in lines if re.match(r"\d+ ", line)]
    assert [row[0] for row in rows] == [str(step) for step in range(8)]
    assert rows[1][1] != "—"
    assert [row[1:3] for row in rows[2:]] == [["—", "—"]] * 6
    lengths = [float(row[3]) for row in rows]
    assert lengths == sorted(lengths)
    assert f"acceptance length {lengths[1]:.4f}" in lines[0]


def test_serving_otherwise_than_the_text_was_sampled_is_a_proxy(command: tuple[Any, ...]) -> None:
    own = answered(*command)
    assert "proxy" not in own
    warm = " ".join(answered(*command, "--temperature", 0.7, "--top-p", 0.9, "--sampled").split())
    assert "acceptance length (proxy)" in warm
    assert "sampled draft at temperature 0.7, top-p 0.9" in warm
    assert (
        "proxy: the text was sampled at temperature 0, but is served at temperature 0.7 and top-p 0.9, "
        "so acceptance is only an indication"
    ) in warm
    told = record(*command, "--temperature", 0.7)["acceptance"]
    assert (told["temperature"], told["top_p"], told["own_text"]) == (0.7, 1.0, True)
    assert told["proxy"].endswith("is served at temperature 0.7")
    assert record(*command, "--temperature", 0)["acceptance"]["proxy"] == ""


def test_a_tree_stands_beside_the_chain(command: tuple[Any, ...]) -> None:
    words = (*command, "-k", 2, "--decode", 2, "--tree", "3x2")
    told = record(*words)["decoding"]
    assert (told["shape"], told["tree"]["shape"]) == ("chain of 2", "tree 3x2")
    assert told["same_text"] == told["tree"]["same_text"] == told["responses"] == 2
    assert told["tree"]["length"] >= told["length"] > 1
    assert told["length"] == pytest.approx(told["evaluator"]["length"])
    assert told["speedup_low"] <= told["speedup"] <= told["speedup_high"]
    shown = answered(*words)
    assert re.search(r"tree 3x2 +\d+ +\d+ +\d\.\d{4} ", shown)
    assert "2 of 2 texts equal plain greedy decoding\n2 of 2 with the tree" in shown
    assert "1 texts in each way, drawn at temperature 0.7" in answered(*command, "--decode", 1, "--temperature", 0.7)


def test_what_cannot_be_served_or_decoded_is_told(command: tuple[Any, ...], tmp_path: Path) -> None:
    assert "--tree 3x2: a tree is measured by decoding; add --decode 8" in refused(*command, "--tree", "3x2")
    assert "tree '3y2': write 4x2x1 for branches, or 4,4,16" in refused(*command, "--tree", "3y2", "--decode", 1)
    assert "tokens: 2 steps with topk 2 draft 6 tokens" in refused(*command, "--tree", "2,2,9", "--decode", 1)
    assert "top_p = 0.0: input should be greater than 0" in refused(*command, "--top-p", 0)


def test_text_is_sampled_with_top_p(world: World, tmp_path: Path) -> None:
    prompts, own, features = tmp_path / "prompts.jsonl", tmp_path / "own.jsonl", tmp_path / "features"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(4)))
    making = ["capture", "-t", world.target, "--generate", prompts, "--responses", own, "--max-new-tokens", 8]
    making += ["--max-length", 128, "--temperature", 0.8, "-o", features]
    answered(*making, "--top-p", 0.9)
    manifest = FeatureStore.open(features).manifest
    assert (manifest.temperature, manifest.top_p) == (0.8, 0.9)
    assert "was generated with top-p 0.9, not 1.0; write the answers to a new file" in refused(*making)
    assert "top_p 0.0: must be above 0 and at most 1" in refused(*making, "--top-p", 0)


# The speed-up that is predicted, and beside it the one that decoding measures


def draft_times(command: tuple[Any, ...]) -> list[dict[str, Any]]:
    """The draft of ``command`` as a profile measured it."""
    spec = json.loads(answered("show", command[1], "--json"))
    points = [(batch, context) for batch in (1, 4) for context in (64, 256)]
    return [{"name": "mine", "hash": spec["hash"], "times": [at(*point, 2.0, 0.5) for point in points]}]


@pytest.fixture(scope="module")
def timed(world: World, command: tuple[Any, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    path = world.profile(tmp_path_factory.mktemp("profile") / "p.json", drafts=draft_times(command))
    return *command, "--profile", path


def by_hand(length: float, k: int) -> float:
    return length * 10.1 / (10 + 0.1 * (k + 1) + 2 * k + 0.5)


def test_the_speed_up_of_every_k_is_predicted_from_a_profile(timed: tuple[Any, ...]) -> None:
    told = record(*timed)
    lengths, predicted = told["acceptance"]["length_by_k"], told["prediction"]
    expected = {str(k): pytest.approx(by_hand(length, k)) for k, length in enumerate(lengths, 1)}
    assert {k: one["speedup"] for k, one in predicted["by_k"].items()} == expected
    assert predicted["speedup"] == max(one["speedup"] for one in predicted["by_k"].values())
    assert predicted["by_k"][str(predicted["k"])]["speedup"] == predicted["speedup"]
    assert predicted["by_k"]["3"] == {
        "length": lengths[2],
        "cycle_ms": pytest.approx(10.4 + 3 * 2 + 0.5),
        "speedup": pytest.approx(by_hand(lengths[2], 3)),
    }
    source = "profile of a quiet machine, float32, 1 thread; batch 1, context 256"
    assert (predicted["source"], predicted["draft_source"], predicted["parts"]) == (source, "measured", None)
    assert (told["decoding"], told["comparison"]) == (None, None)
    shown = answered(*timed)
    assert f"speed-up {predicted['speedup']:.3f} at k = {predicted['k']}, predicted from the {source}\n" in shown
    assert re.search(rf"^ +3 +{lengths[2]:.4f} +16.900 +{by_hand(lengths[2], 3):.3f}$", shown, flags=re.MULTILINE)
    assert "milliseconds: draft step 2.000 (measured), T_0 0.500, T(1) 10.100\n" in shown


def test_the_prediction_is_of_the_use_that_is_asked_for(timed: tuple[Any, ...]) -> None:
    told = record(*timed, "--batch", 2, "--context", 100, "--draft-lengths", "2-3")["prediction"]
    assert told["source"].endswith("batch 2, context 100")
    assert list(told["by_k"]) == ["2", "3"]
    assert told["target_ms"]["1"] == pytest.approx(20.1)
    roofline = record(
        *timed[:-2], "--accelerator", "h100 sxm", "--dtype", "float32", "--context", 99, "--draft-lengths", 1
    )["prediction"]
    assert roofline["source"] == "roofline H100-SXM, float32, batch 1, context 99"
    assert (roofline["k"], roofline["draft_source"], list(roofline["by_k"])) == (1, "roofline", ["1"])
    assert sum(roofline["parts"].values()) == pytest.approx(roofline["draft_ms"])
    foreign = " ".join(answered(*timed, "--temperature", 0.7).split())
    assert "speed-up (proxy) " in foreign


@pytest.mark.usefixtures("few_threads")
def test_decoding_takes_the_fastest_k_and_stands_beside_the_prediction(
    timed: tuple[Any, ...], world: World, tmp_path: Path
) -> None:
    told = record(*timed, "--decode", 2)
    k, compared, decoding = told["prediction"]["k"], told["comparison"], told["decoding"]
    assert (compared["k"], decoding["shape"]) == (k, f"chain of {k}")
    assert compared["predicted"] == told["prediction"]["speedup"]
    own = by_hand(decoding["evaluator"]["length_by_k"][k - 1], k)
    assert compared["predicted_for_decoded"] == pytest.approx(own)
    assert [compared[name] for name in ("measured", "low", "high")] == [
        decoding[name] for name in ("speedup", "speedup_low", "speedup_high")
    ]
    assert compared["off_by"] == pytest.approx(compared["measured"] / compared["predicted"] - 1)
    assert compared["off_by_for_decoded"] == pytest.approx(compared["measured"] / own - 1)
    assert compared["incomparable"] == f"predicted for a quiet machine, but measured on {hardware()['processor']}"
    documented = keys(section(page("acceptance.md"), "## Predicted and measured"))
    assert documented == set(told["prediction"]) | set(compared)
    other = record(*timed, "--decode", 1, "-k", 5)
    assert (other["comparison"]["k"], other["decoding"]["shape"]) == (5, "chain of 5")
    assert other["comparison"]["predicted"] == other["prediction"]["by_k"]["5"]["speedup"]
    assert other["acceptance"]["length"] == other["acceptance"]["length_by_k"][4]


@pytest.mark.usefixtures("few_threads")
def test_what_cannot_be_compared_is_told(timed: tuple[Any, ...], world: World, tmp_path: Path) -> None:
    here = hardware()["processor"]
    mine = json.loads(Path(timed[-1]).read_text())["drafts"]
    same = world.profile(tmp_path / "same.json", hardware=here, drafts=mine)
    shown = answered(*timed[:-1], same, "--decode", 1, "-k", 2)
    rows = [line.split() for line in shown.splitlines() if line.startswith(("all held-out", "those decoded"))]
    assert [len(row) for row in rows] == [8, 7]
    assert all(re.fullmatch(r"[+-]\d+\.\d%", row[-1]) for row in rows)
    assert "not comparable" not in shown
    other = world.profile(tmp_path / "other.json", hardware=here, dtype="bfloat16", drafts=mine)
    assert (
        "not comparable: predicted for bfloat16, but measured in float32; "
        "predicted for a batch of 4, but measured with one sequence at a time\n"
    ) in answered(*timed[:-1], other, "--decode", 1, "--batch", 4)
    told = record(*timed[:-2], "--accelerator", "H200", "--context", 99, "--decode", 1)["comparison"]["incomparable"]
    assert told == f"predicted from the roofline H200, bfloat16, batch 1, context 99, but measured on {here}"


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with times is told before the minutes that acceptance takes."""
    monkeypatch.setattr("runners.commands.evaluation.measure_acceptance", None)


LARGER_K = "k drafted tokens need k + 1, so measure with a larger k"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch 2", "--batch 2: needs times; add --profile FILE or --accelerator NAME"),
        ("--draft-lengths 1-4", "--draft-lengths 1-4: needs times; add --profile FILE or --accelerator NAME"),
        ("--profile {p} --accelerator H200", "times come from one place: give --profile or --accelerator"),
        ("--profile {p} --dtype float8", "--dtype float8: is the roofline's; {p} was measured in float32"),
        ("--profile {p} --draft-lengths 6-2", "--draft-lengths 6-2: the range is empty; use 2-6"),
        (
            "--profile {p} --draft-lengths 0-2",
            "--draft-lengths 0-2: write a least and a greatest k, such as 1-8, or one k",
        ),
        (
            "--accelerator H200 --draft-lengths 1-12",
            "--draft-lengths 1-12: acceptance is measured up to 8; raise --draft-length to 12",
        ),
        (
            "--profile {p} --batch 9",
            "--profile: {p}: 9 sequences in a batch are outside what was measured, 1 to 4; the nearest is 4",
        ),
        (
            "--profile {p} --context 300",
            "--profile: {p}: 300 tokens of context are outside what was measured, 64 to 256; the nearest is 256",
        ),
        (
            "--profile {p} -k 9 --decode 1 --draft-lengths 1-8",
            "--profile: {p}: 10 tokens a sequence are outside what was measured, 1 to 9; the nearest is 9; " + LARGER_K,
        ),
        (
            "--accelerator H200 --dtype int8",
            "--accelerator H200: dtype = 'int8': choose from float32, bfloat16, float16, float8",
        ),
        ("--profile {p}.none", "{p}.none: no such file"),
    ],
)
@pytest.mark.usefixtures("nothing_is_measured")
def test_times_that_do_not_fit_are_told(words: str, message: str, timed: tuple[Any, ...]) -> None:
    *command, _, path = timed
    assert refused(*command, *words.format(p=path).split()) == f"error: {message.format(p=path)}\n"


@pytest.mark.usefixtures("nothing_is_measured")
def test_a_draft_that_no_measured_one_tells_of(command: tuple[Any, ...], world: World, tmp_path: Path) -> None:
    other = [draft | {"name": "theirs", "hash": "0" * 12} for draft in draft_times(command)]
    profile = world.profile(tmp_path / "p.json", drafts=other)
    own = draft_times(command)[0]["hash"]
    assert refused(*command, "--profile", profile) == (
        f"error: --profile: {profile}: draft eagle3 ({own}) was not measured, and of theirs none was at batch 1, "
        "context 256 with its spec, from which it could be fitted; measure more with archspec profile --draft\n"
    )


def test_a_profile_of_short_chains_predicts_them(command: tuple[Any, ...], world: World, tmp_path: Path) -> None:
    few = [{"batch": 1, "context": 64, "rows": rows, "ms": 1.0} for rows in (1, 2, 4)]
    short = world.profile(tmp_path / "short.json", target_times=few, drafts=draft_times(command))
    told = record(*command, "--profile", short)["prediction"]
    assert (list(told["by_k"]), told["source"][-20:]) == (["1", "2", "3"], " batch 1, context 64")
