"""Training: exact resume, the schedule, the budget, and what happens when it goes wrong."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from archspec.errors import ArchspecError
from archspec.files import save_tensors
from runners.features.capture import capture
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.training.batches import read_batch
from runners.training.device import autocast, pick_device
from runners.training.trainer import DivergedError, Trainer
from runners.training.trial import make_draft
from tests.runners.drafts import SETTINGS, everything, largest_gap, new_trainer, run, single_thread, tiny_spec
from tests.runners.tiny import conversation, tiny_config, tiny_model, tiny_tokenizer

REFUSED = r"checkpoint.safetensors: checkpoint of draft [0-9a-f]{12}, but this trial's draft is [0-9a-f]{12}"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    single_thread()


def epoch_tokens(store: FeatureStore) -> int:
    return sum(document.length for document in store.documents)


@pytest.mark.parametrize("stop", ["mid-epoch", "at the border", "in the second epoch"])
def test_a_stop_changes_no_loss_and_no_weight(tiny_store: FeatureStore, tmp_path: Path, stop: str) -> None:
    epoch = epoch_tokens(tiny_store)
    until = {"mid-epoch": epoch // 2, "at the border": epoch, "in the second epoch": epoch * 3 // 2}[stop]
    settings, total = SETTINGS.model_copy(update={"batch_tokens": 200}), 2 * epoch + 50
    straight = new_trainer(tiny_store, settings, total_tokens=total)
    wanted = run(straight, total)
    stopped = new_trainer(tiny_store, settings, total_tokens=total)
    reports = run(stopped, until)
    assert 0 < len(reports) < len(wanted)
    assert stopped.progress.epoch == {"mid-epoch": 0, "at the border": 1, "in the second epoch": 1}[stop]
    stopped.save(tmp_path / "checkpoint")
    torch.manual_seed(99)  # a resume must not depend on the global generator
    resumed = new_trainer(tiny_store, settings, total_tokens=total)
    resumed.load(tmp_path / "checkpoint")
    reports += run(resumed, total)
    assert reports == wanted
    assert resumed.progress == straight.progress
    assert largest_gap(resumed.draft, straight.draft) == 0


def test_stopping_at_a_rung_in_one_process_changes_nothing(tiny_store: FeatureStore) -> None:
    straight, stopping = (new_trainer(tiny_store, total_tokens=1500) for _ in range(2))
    assert run(stopping, 500) + run(stopping, 900) + run(stopping, 1500) == run(straight, 1500)


def test_an_untrained_draft_can_be_saved_and_loaded(tiny_store: FeatureStore, tmp_path: Path) -> None:
    fresh, loaded = new_trainer(tiny_store), new_trainer(tiny_store)
    fresh.save(tmp_path / "checkpoint")
    loaded.load(tmp_path / "checkpoint")
    assert run(loaded, 600) == run(fresh, 600)


def test_seeds_give_other_weights_and_another_order(tiny_store: FeatureStore) -> None:
    first, second = new_trainer(tiny_store, seed=0), new_trainer(tiny_store, seed=1)
    assert largest_gap(first.draft, second.draft) > 0
    assert run(first, 600) != run(second, 600)


def test_the_loss_falls(tiny_store: FeatureStore) -> None:
    reports = run(new_trainer(tiny_store, total_tokens=6000), 6000)
    first, last = reports[0], reports[-1]
    assert last.loss < 0.8 * first.loss
    assert all(after < before for before, after in zip(first.step_kl, last.step_kl, strict=True))


def test_a_report_says_what_happened(tiny_store: FeatureStore) -> None:
    trainer = new_trainer(tiny_store)
    reports = run(trainer, 900)
    assert [report.step for report in reports] == list(range(1, len(reports) + 1))
    assert reports[-1].tokens == trainer.progress.tokens
    for report in reports:
        assert len(report.step_kl) == SETTINGS.ttt_steps
        decayed = sum(SETTINGS.step_decay**step * kl for step, kl in enumerate(report.step_kl))
        assert report.loss == pytest.approx(decayed, rel=1e-5)


def test_the_budget_is_reached_and_not_passed_by_more_than_a_batch(tiny_store: FeatureStore) -> None:
    trainer = new_trainer(tiny_store)
    for budget in (1, 700, 1500):
        run(trainer, budget)
        assert budget <= trainer.progress.tokens < budget + SETTINGS.batch_tokens
    assert run(trainer, 1500) == []


def test_learning_rate_warms_up_and_falls_on_a_cosine(tiny_store: FeatureStore) -> None:
    settings = SETTINGS.model_copy(update={"learning_rate": 0.01, "warmup": 0.1, "final_lr": 0.2, "batch_tokens": 100})
    trainer = new_trainer(tiny_store, settings, total_tokens=10_000)
    assert 0 < trainer.learning_rate(0) < 0.01 / 50
    assert trainer.learning_rate(500) == pytest.approx(0.005)
    assert trainer.learning_rate(1000) == pytest.approx(0.01)
    assert trainer.learning_rate(5500) == pytest.approx(0.01 * (0.2 + 0.8 * 0.5))
    assert trainer.learning_rate(10_000) == pytest.approx(0.002)
    assert trainer.learning_rate(12_000) == pytest.approx(0.002)
    rates = [trainer.learning_rate(tokens) for tokens in range(0, 10_001, 100)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_learning_rate_without_warm_up_starts_at_the_peak(tiny_store: FeatureStore) -> None:
    trainer = new_trainer(tiny_store, SETTINGS.model_copy(update={"warmup": 0.0}))
    assert trainer.learning_rate(0) == pytest.approx(SETTINGS.learning_rate)


def test_learning_rate_by_depth(tiny_store: FeatureStore) -> None:
    settings = SETTINGS.model_copy(update={"learning_rate_rule": "inverse_sqrt_depth", "warmup": 0.0})
    for depth in (1, 2):
        spec = tiny_spec(tiny_store.facts, changes={"depth": depth})
        trainer = new_trainer(tiny_store, settings, spec=spec)
        assert trainer.learning_rate(0) == pytest.approx(settings.learning_rate / math.sqrt(depth))


def test_each_step_uses_the_rate_of_its_first_token(tiny_store: FeatureStore) -> None:
    trainer = new_trainer(tiny_store)
    reports = run(trainer, 1500)
    before = [0, *(report.tokens for report in reports[:-1])]
    assert [report.learning_rate for report in reports] == [trainer.learning_rate(tokens) for tokens in before]


def test_the_gradient_is_clipped(tiny_store: FeatureStore) -> None:
    """AdamW hides a gradient's scale, so look at its first moment: after one step it is (1 - beta1) * gradient."""
    settings = SETTINGS.model_copy(update={"grad_clip": 1e-3})
    trainer = new_trainer(tiny_store, settings)
    (report,) = run(trainer, 1)
    assert report.grad_norm > 1e-2  # told as it was before clipping
    moments = [
        state["exp_avg"] / (1 - settings.betas[0]) for state in trainer._optimizer.state.values() if "exp_avg" in state
    ]
    norm = math.sqrt(sum(float(moment.square().sum()) for moment in moments))
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_frozen_copies_of_the_target_stay_as_they_are(tiny_store: FeatureStore) -> None:
    trainer = new_trainer(tiny_store, spec=tiny_spec(tiny_store.facts, "eagle1"))
    run(trainer, 600)
    weights = tiny_store.weights()
    assert torch.equal(trainer.draft.embed_tokens.weight, weights.embed_tokens)
    assert torch.equal(trainer.draft.lm_head.weight, weights.lm_head)


def test_a_huge_learning_rate_diverges(tiny_store: FeatureStore) -> None:
    settings = SETTINGS.model_copy(update={"learning_rate": 1e30, "warmup": 0.0})
    with pytest.raises(DivergedError, match=r"loss .* and gradient norm .* at step \d"):
        run(new_trainer(tiny_store, settings), 4000)


def test_a_nan_weight_diverges_before_it_reaches_the_optimiser(tiny_store: FeatureStore) -> None:
    trainer = new_trainer(tiny_store)
    with torch.no_grad():
        trainer.draft.lm_head.weight[0, 0] = math.nan
    before = trainer.draft.inputs.fc.weight.clone()  # type: ignore[operator]
    with pytest.raises(DivergedError, match="loss nan"):
        run(trainer, 1)
    assert torch.equal(trainer.draft.inputs.fc.weight, before)  # type: ignore[arg-type]
    assert trainer.progress.step == 0


@pytest.mark.parametrize("preset", ["eagle3", "eagle1"])
def test_bfloat16_trains_over_float32_weights_and_stays_close(tiny_store: FeatureStore, preset: str) -> None:
    spec = tiny_spec(tiny_store.facts, preset)
    single = run(new_trainer(tiny_store, spec=spec, total_tokens=2500), 2500)
    trainer = new_trainer(tiny_store, SETTINGS.model_copy(update={"dtype": "bfloat16"}), spec=spec, total_tokens=2500)
    half = run(trainer, 2500)
    assert all(parameter.dtype == torch.float32 for parameter in trainer.draft.parameters())
    assert half != single
    assert half[0].loss == pytest.approx(single[0].loss, rel=0.02)
    assert half[0].grad_norm == pytest.approx(single[0].grad_norm, rel=0.05)
    assert half[-1].loss == pytest.approx(single[-1].loss, rel=0.15)


def test_dtype_and_device_by_name() -> None:
    assert pick_device("cpu") == "cpu"
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    with autocast("float32", "cpu"):
        assert not torch.is_autocast_enabled("cpu")
    with autocast("bfloat16", "cpu"):
        assert torch.is_autocast_enabled("cpu")


def test_the_loss_of_a_batch_does_not_depend_on_padding(tiny_store: FeatureStore) -> None:
    """A document's rows see themselves alone: together with a longer one it adds the same KL as by itself."""
    trainer = new_trainer(tiny_store)
    order = sorted(everything(tiny_store), key=lambda index: tiny_store.documents[index].length)
    layers = trainer.draft.spec.inputs.aux_layers
    pair = [order[0], order[-1]]
    totals = torch.zeros(SETTINGS.ttt_steps)
    counts = torch.zeros(SETTINGS.ttt_steps)
    with torch.no_grad():
        for index in pair:
            rows = torch.tensor([_counted(tiny_store, index, step) for step in range(SETTINGS.ttt_steps)])
            totals += trainer.loss(read_batch(tiny_store, [index], layers, "cpu"))[1] * rows
            counts += rows
        together = trainer.loss(read_batch(tiny_store, pair, layers, "cpu"))[1]
    torch.testing.assert_close(together, totals / counts)


def _counted(store: FeatureStore, index: int, step: int) -> int:
    mask = store.read(index, []).response_mask
    return int(mask[step + 2 :].sum())


def test_no_text_to_train_on_is_told(tiny_store: FeatureStore) -> None:
    draft = make_draft(tiny_spec(tiny_store.facts), tiny_store, [0], 0)
    with pytest.raises(ArchspecError, match="no conversation to train on; lower the holdout"):
        Trainer(draft, tiny_store, [], SETTINGS, 0, 100)


@pytest.fixture
def checkpoint(tiny_store: FeatureStore, tmp_path: Path) -> Path:
    trainer = new_trainer(tiny_store)
    run(trainer, 300)
    trainer.save(tmp_path / "checkpoint.safetensors")
    return tmp_path / "checkpoint.safetensors"


def test_a_checkpoint_of_another_seed_is_refused(tiny_store: FeatureStore, checkpoint: Path) -> None:
    with pytest.raises(
        ArchspecError, match=r"checkpoint.safetensors: checkpoint of seed 0, but this trial's seed is 3"
    ):
        new_trainer(tiny_store, seed=3).load(checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 2},
        {"layers.0.mlp.intermediate_size": 40},
        {"layers.0.attention.window": 4},  # the same tensors in the same shapes
        {"layers.0.mlp.depth": 0},  # fewer tensors than the checkpoint holds
    ],
)
def test_a_checkpoint_of_another_draft_is_refused(
    tiny_store: FeatureStore, checkpoint: Path, changes: dict[str, object]
) -> None:
    other = new_trainer(tiny_store, spec=tiny_spec(tiny_store.facts, changes=changes))
    before = [parameter.clone() for parameter in other.draft.parameters()]
    with pytest.raises(ArchspecError, match=REFUSED):
        other.load(checkpoint)
    assert all(torch.equal(old, new) for old, new in zip(before, other.draft.parameters(), strict=True))


def test_a_damaged_checkpoint_is_told(tiny_store: FeatureStore, checkpoint: Path) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    with pytest.raises(ArchspecError, match=r"checkpoint\.safetensors: not a checkpoint of this draft"):
        new_trainer(tiny_store).load(checkpoint)


@pytest.mark.parametrize("lost", ["param.norm.weight", "exp_avg.norm.weight"])
def test_a_checkpoint_that_lacks_a_tensor_is_told(tiny_store: FeatureStore, checkpoint: Path, lost: str) -> None:
    with safe_open(str(checkpoint), framework="pt") as file:
        metadata, names = file.metadata(), file.keys()
        tensors = {name: file.get_tensor(name) for name in names if name != lost}
    save_tensors(checkpoint, tensors, metadata)
    with pytest.raises(ArchspecError, match=r"checkpoint\.safetensors: not a checkpoint of this draft"):
        new_trainer(tiny_store).load(checkpoint)


def test_a_file_that_is_no_checkpoint_is_told(tiny_store: FeatureStore, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    save_tensors(path, {"x": torch.zeros(1)})
    for wrong in (path, tmp_path / "missing.safetensors"):
        with pytest.raises(ArchspecError, match=f"{wrong.name}: not a checkpoint of this draft"):
            new_trainer(tiny_store).load(wrong)


MEMORY_SCRIPT = """
import sys
from pathlib import Path
import psutil
from runners.features.store import FeatureStore
from tests.runners.drafts import SETTINGS, new_trainer, single_thread

single_thread()
store = FeatureStore.open(Path(sys.argv[1]))
trainer = new_trainer(store, SETTINGS.model_copy(update={"ttt_steps": 1}), total_tokens=10**6)
trainer.run(1000)
process = psutil.Process()
before, peak = process.memory_info().rss, 0

def watch(report):
    global peak
    peak = max(peak, process.memory_info().rss)

trainer.run(sum(document.length for document in store.documents), watch)
print(peak - before)
"""


def test_resident_memory_does_not_grow_with_the_store(tmp_path: Path) -> None:
    """A pass over a store of many shards, read in full, leaves behind less than a fifth of it."""
    wide = Target(tiny_model(tiny_config(hidden_size=256)), tiny_tokenizer(), "wide")
    texts = [conversation("word " * 5, "and " * (10 + index % 7), name=f"{index}") for index in range(100)]
    store = capture(wide, texts, [0, 1, 2, 3], tmp_path / "store", "float32", 256, 4096, 1000)
    assert store.size > 30 << 20
    out = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(store.path)], capture_output=True, text=True, check=True
    )
    assert int(out.stdout) < store.size / 5
