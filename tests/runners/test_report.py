"""What a search leaves for people: leaderboard, best config, and a verdict that can be checked by hand."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from archspec.cost import draft_params, flops_per_token, trainable_params
from archspec.formats import FORMATS, configs
from archspec.servable import servable_by, verdicts
from archspec.weights import load_draft, save_draft
from runners.features.store import FeatureStore
from runners.search.driver import Search
from runners.search.executor import Event, Failure
from runners.search.leaderboard import write_leaderboard
from runners.search.record import Record
from runners.search.report import best_config, metrics_of, write_provenance, write_results
from runners.search.result import BestConfig
from runners.search.run_folder import RunFolder
from runners.training.trial import WEIGHTS_FOLDER, RungTask, make_draft
from tests.runners.drafts import everything
from tests.runners.replay import ReplayExecutor, by_formula, new_folder, search_file

COLUMNS = (  # as the file's first line
    "rank,trial,name,baseline,state,rungs,train_tokens,value,speedup,best_k,draft_ms,draft_ms_source,pareto,meets,"
    "acceptance_length,low,high,seeds,failed_seeds,seed_std,acceptance_rate,alpha_0,alpha_1,alpha_2,params,trainable_params,flops_per_token,servable_by,loss,tokens_per_second,train_seconds,"
    "dtype,seed,data,own_text,proxy,learning_rate,failure_kind,failure,hash"
)


class Silent:
    def began(self, search: Search) -> None:
        pass

    def changed(self, search: Search, event: Event) -> None:
        return


def answer(task: RungTask) -> Any:
    """The formula, but the third trial fails; the last rung leaves weights, as a real trial does."""
    return Failure("diverged", "loss nan") if task.number == 2 else by_formula(task)


@pytest.fixture(scope="module")
def done(tiny_store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> tuple[Search, Sequence[Record]]:
    """A finished search with three seeds for two finalists, and its files."""
    file = search_file(tiny_store, {"seeds": 3, "finalists": 2}, seed=3)
    folder = new_folder(tmp_path_factory.mktemp("report") / "run", file)
    search = Search(folder, file, tiny_store, ReplayExecutor(answer), Silent())
    ranked = search.execute()
    draft = make_draft(ranked[0].spec, tiny_store, everything(tiny_store), 0)
    save_draft(draft, folder.trial(ranked[0].number) / WEIGHTS_FOLDER)
    write_provenance(folder, search)
    write_results(search, ranked)
    return search, ranked


def leaderboard(folder: RunFolder) -> list[dict[str, str]]:
    with folder.leaderboard.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_leaderboard_has_every_architecture_in_order(done: tuple[Search, Sequence[Record]]) -> None:
    search, ranked = done
    rows = leaderboard(search.folder)
    assert ",".join(rows[0]) == COLUMNS
    assert [int(row["trial"]) for row in rows[: len(ranked)]] == [record.number for record in ranked]
    assert [row["rank"] for row in rows] == [str(rank) for rank in range(1, len(ranked) + 1)] + [""] * (
        len(rows) - len(ranked)
    )
    assert sorted(int(row["trial"]) for row in rows) == sorted(search.study.records)
    states = [row["state"] for row in rows]
    assert states == sorted(states, key=["complete", "pruned", "failed"].index)
    stopped = [(int(row["rungs"]), float(row["acceptance_length"])) for row in rows if row["state"] == "pruned"]
    assert stopped == sorted(stopped, reverse=True)
    assert (rows[-1]["failure_kind"], rows[-1]["failure"]) == ("diverged", "loss nan")


def test_a_row_of_the_leaderboard_by_hand(done: tuple[Search, Sequence[Record]]) -> None:
    search, ranked = done
    record, row = ranked[0], leaderboard(search.folder)[0]
    lengths = [record.measurements[-1].length, *(m.length for m in record.repeats)]
    mean = sum(lengths) / 3
    spread = (sum((length - mean) ** 2 for length in lengths) / 2) ** 0.5
    wanted = {
        "acceptance_length": round(mean, 5),
        "seed_std": round(spread, 5),
        "low": round(record.measurements[-1].acceptance["low"], 5),
        "high": round(record.measurements[-1].acceptance["high"], 5),
        "acceptance_rate": round(record.measurements[-1].acceptance["rate"], 5),
        "alpha_1": round(record.measurements[-1].acceptance["conditional"][1], 5),
        "params": draft_params(record.spec),
        "trainable_params": trainable_params(record.spec),
        "flops_per_token": flops_per_token(record.spec),
        "train_tokens": 400,
        "train_seconds": 6,
        "rungs": 3,
        "seeds": 3,
        "seed": 3,
    }
    assert {name: float(row[name]) for name in wanted} == wanted
    assert (row["own_text"], row["hash"], row["name"]) == ("True", record.candidate.hash, record.name)
    assert row["data"] == search.store.fingerprint
    assert row["baseline"] == str(bool(record.baseline))


def test_the_leaderboard_can_be_written_while_nothing_is_measured(tiny_store: FeatureStore, tmp_path: Path) -> None:
    file = search_file(tiny_store)
    search = Search(new_folder(tmp_path / "run", file), file, tiny_store, ReplayExecutor(by_formula), Silent())
    write_leaderboard(search)
    assert not search.folder.leaderboard.exists()
    search.study.draw()
    write_leaderboard(search)
    (row,) = leaderboard(search.folder)
    assert ",".join(row) == COLUMNS
    assert (row["state"], row["acceptance_length"], row["alpha_0"], row["loss"]) == ("running", "", "", "")


def test_best_config_keeps_its_own_schema_and_says_what_is_asked_of_it(
    done: tuple[Search, Sequence[Record]],
) -> None:
    search, ranked = done
    data = json.loads(search.folder.best_config.read_text(encoding="utf-8"))
    jsonschema.validate(data, BestConfig.model_json_schema())
    winner = ranked[0]
    assert data["version"] == 3
    assert data["spec"] == winner.spec.model_dump(mode="json")
    assert data["spec_as_written"] == winner.candidate.written.model_dump(mode="json")
    assert data["metrics"] == metrics_of(winner, search.study.scorer).model_dump(mode="json")
    assert data["metrics"]["length"] == pytest.approx(search.gain(winner))
    assert {standing["name"] for standing in data["baselines"]} == {"eagle3", "eagle3-deep-fused-once"}
    assert data["seeds"] == [3, 4, 5]
    assert data["budget"]["rungs"] == [100, 200, 400]
    assert data["target"]["fingerprint"] == search.store.manifest.key.target
    assert data["data"]["features"] == search.store.fingerprint
    assert data["data"]["text_origin"] == "own"
    assert data["data"]["train_conversations"] + data["data"]["heldout_conversations"] == 12
    assert data["hardware"]["cores"] >= 1
    assert data["code_version"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**data, "version": 2}, BestConfig.model_json_schema())


def test_best_config_says_who_serves_and_who_holds_the_draft(done: tuple[Search, Sequence[Record]]) -> None:
    search, ranked = done
    data = json.loads(search.folder.best_config.read_text(encoding="utf-8"))
    spec = ranked[0].spec
    assert data["servable"] == {verdict.engine: verdict.as_dict() for verdict in verdicts(spec)}
    assert data["draft_model_configs"] == configs(spec)
    assert data["draft_model_configs"].keys() | data["not_held_by"].keys() == FORMATS.keys()
    assert not data["draft_model_configs"].keys() & data["not_held_by"].keys()
    assert "inputs.norm = none: EAGLE-1 has target; use target" in data["not_held_by"]["eagle1"]
    plain = best_config(search, [record for record in ranked if record.name == "eagle3"])
    assert plain.servable["vllm"]["servable"] == "yes"
    assert plain.draft_model_configs.keys() == {"vllm", "specforge", "speculators"}
    assert plain.draft_model_configs["vllm"]["hidden_size"] == 32
    assert plain.not_held_by["sglang"] == [
        "inputs.aux_layers = [1, 2, 3]: SGLang cannot read the last layer's output; use layers up to 2"
    ]
    rows = {row["name"]: row for row in leaderboard(search.folder)}
    assert rows["eagle3"]["servable_by"] == "vllm"
    assert rows[data["name"]]["servable_by"] == " ".join(servable_by(spec))


def test_the_winners_weights_are_copied(done: tuple[Search, Sequence[Record]]) -> None:
    search, ranked = done
    assert load_draft(search.folder.best, search.store.weights()).spec == ranked[0].spec
    leftovers = [path.name for path in search.folder.path.rglob("*.part")]
    assert leftovers == []


def test_provenance_names_target_data_code_and_hardware(done: tuple[Search, Sequence[Record]]) -> None:
    search, _ = done
    data = json.loads(search.folder.provenance.read_text(encoding="utf-8"))
    assert data["target"]["fingerprint"] == search.store.manifest.key.target
    assert data["features"]["fingerprint"] == search.store.fingerprint
    assert data["space"]["hash"] == search.file.space.hash
    assert data["code_version"]
    assert data["hardware"]["torch"]
