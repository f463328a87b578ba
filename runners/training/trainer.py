"""Training of one draft from a feature store: training-time test, KL loss, budget in tokens, exact resume."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from archspec.errors import ArchspecError
from archspec.files import save_tensors
from archspec.modules import Draft
from archspec.unroll import unroll
from runners.features.store import FeatureStore
from runners.training.batches import Batch, epoch_batches, read_batch
from runners.training.device import autocast, pick_device
from runners.training.loss import Targets, unroll_loss
from runners.training.parallel import ALONE, Workers
from runners.training.settings import TrainSettings
from runners.training.teacher import Teacher

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


class DivergedError(Exception):
    """The loss or the gradient stopped being a finite number."""


@dataclass(frozen=True)
class StepReport:
    """One optimiser step: tokens seen so far, learning rate, loss, mean KL of every draft step, gradient norm."""

    step: int
    tokens: int
    learning_rate: float
    loss: float
    step_kl: tuple[float, ...]
    grad_norm: float


@dataclass
class Progress:
    """Where training stands; with the seed it determines every batch that is still to come.

    ``mean_loss`` is a running average over about the last twenty steps; 0 before the first. ``seconds`` is the time
    that the steps took.
    """

    step: int = 0
    tokens: int = 0
    epoch: int = 0
    batch: int = 0
    mean_loss: float = 0.0
    seconds: float = field(default=0.0, compare=False)

    def take_loss(self, loss: float) -> None:
        """Count one step's loss: a plain mean over the first twenty, after that the last count for more."""
        share = max(0.05, 1 / (self.step + 1))
        self.mean_loss = loss if self.step == 0 else (1 - share) * self.mean_loss + share * loss


class Trainer:
    """Trains ``draft`` on the documents ``indices`` of ``store`` up to ``total_tokens``, in as many calls as one likes.

    The schedule depends on ``total_tokens`` alone, so stopping at a rung and going on later changes nothing. With
    several ``workers`` each has a trainer of the same draft; they take each step together, on one batch.
    """

    def __init__(
        self,
        draft: Draft,
        store: FeatureStore,
        indices: list[int],
        settings: TrainSettings,
        seed: int,
        total_tokens: int,
        workers: Workers = ALONE,
    ) -> None:
        if not indices:
            raise ArchspecError("there is no conversation to train on; lower the holdout or capture more text")
        self.device = pick_device(settings.device)
        self.draft = draft.to(self.device)
        self.settings, self.seed, self.total_tokens = settings, seed, total_tokens
        self.progress = Progress()
        self._store, self._workers = store, workers
        self._lengths = {index: store.documents[index].length for index in indices}
        self._layer_ids = draft.spec.inputs.aux_layers
        self._teacher = Teacher(store.weights(), draft.vocab_ids if draft.spec.reduced_vocab else None, self.device)
        self._optimizer = torch.optim.AdamW(
            draft.trainable_parameters(), lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        depth = len(draft.spec.layers)
        scale = 1 / math.sqrt(depth) if settings.learning_rate_rule == "inverse_sqrt_depth" else 1.0
        self._peak_lr = settings.learning_rate * scale

    def run(self, until_tokens: int, on_step: Callable[[StepReport], None] = lambda _: None) -> None:
        """Train until at least ``until_tokens`` tokens were seen in total.

        Raises:
            DivergedError: loss or gradient norm is not finite.
            ArchspecError: the workers do not stand at the same position of the same store.
        """
        self._begin_together()
        self.draft.train()
        for documents in self._remaining_batches():
            if self.progress.tokens >= until_tokens:
                return
            start = time.monotonic()
            report = self.train_step(self._read_share(documents))
            self.progress.seconds += time.monotonic() - start
            on_step(report)

    def _remaining_batches(self) -> Iterator[list[int]]:
        """Batches from the current position on; a training step moves the position past its batch."""
        while True:
            batches = epoch_batches(self._lengths, self.settings.batch_tokens, self.seed, self.progress.epoch)
            while self.progress.batch < len(batches):
                yield batches[self.progress.batch]
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def _begin_together(self) -> None:
        """Start from the first worker's weights: another processor may have made its own a little different."""
        facts = {"store": self._store.fingerprint, "step": self.progress.step, "tokens": self.progress.tokens}
        self._workers.require_same(facts | {"draft": self.draft.spec.hash, "seed": self.seed})
        self._workers.copy_first([parameter.data for parameter in self.draft.trainable_parameters()])

    def _read_share(self, documents: list[int]) -> Batch:
        """This worker's conversations; one that is left with none reads another's first and counts nothing of it.

        So an idle worker goes through the same steps as the others and adds zeros.
        """
        share = self._workers.share(documents)
        batch = read_batch(self._store, share or documents[:1], self._layer_ids, self.device)
        if share:
            return batch
        return replace(batch, response_mask=torch.zeros_like(batch.response_mask), real_tokens=0)

    def train_step(self, batch: Batch) -> StepReport:
        """One optimiser step on ``batch``, of which this may be one worker's share.

        Raises:
            DivergedError: loss or gradient norm is not finite; the weights are as before.
        """
        rate = self.learning_rate(self.progress.tokens)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with autocast(self.settings.dtype, self.device):
            loss, step_kl = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses, tokens = torch.cat((loss.detach()[None], step_kl)), torch.tensor(batch.real_tokens, device=self.device)
        gradients = [p.grad for p in self.draft.trainable_parameters() if p.grad is not None]
        self._workers.add(losses, tokens, *gradients)
        norm = float(torch.nn.utils.clip_grad_norm_(self.draft.trainable_parameters(), self.settings.grad_clip))
        total, *kl = losses.tolist()
        if not (math.isfinite(norm) and math.isfinite(total)):
            raise DivergedError(f"loss {total} and gradient norm {norm} at step {self.progress.step}")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)  # the next forward needs the room
        self.progress.take_loss(total)
        self.progress.step += 1
        self.progress.tokens += int(tokens)
        self.progress.batch += 1
        return StepReport(self.progress.step, self.progress.tokens, rate, total, tuple(kl), norm)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The training loss of one batch and the mean KL of each draft step, [S].

        Of a worker's share both are what it adds to those of the whole batch: its sums over the rows of all workers.
        """
        steps = self.settings.ttt_steps
        targets = Targets.of(batch.response_mask, steps)
        counts = targets.valid.sum(-1)
        self._workers.add(counts)
        states = unroll(self.draft, batch.next_tokens, batch.aux, steps)
        head_inputs = [self.draft.read_out(state) for state in states]
        weight = self.draft.lm_head.weight
        return unroll_loss(head_inputs, weight, self._teacher, batch.last, targets, self.settings.step_decay, counts)

    def learning_rate(self, tokens: int) -> float:
        """The rate for the step that begins after ``tokens`` tokens: linear warm-up, then a cosine to ``final_lr``."""
        settings, done = self.settings, min(1.0, tokens / self.total_tokens)
        if done < settings.warmup:
            return self._peak_lr * max(done / settings.warmup, 1 / (1 + self.total_tokens / settings.batch_tokens))
        cosine = 0.5 * (1 + math.cos(math.pi * (done - settings.warmup) / (1 - settings.warmup)))
        return self._peak_lr * (settings.final_lr + (1 - settings.final_lr) * cosine)

    def save(self, path: Path) -> None:
        """Write weights, optimiser state and position as one safetensors file."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._named_trainable():
            tensors[f"param.{name}"] = parameter.detach()
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        progress = json.dumps(asdict(self.progress))
        save_tensors(path, tensors, {"progress": progress, "seed": str(self.seed), "draft": self.draft.spec.hash})

    def load(self, path: Path) -> None:
        """Go on from ``save``; the same losses follow as without the stop.

        Raises:
            ArchspecError: the checkpoint is damaged, or of another draft or seed.
        """
        try:
            with safe_open(path, framework="pt", device=self.device) as file:
                metadata = file.metadata() or {}
                for key, ours in (("draft", self.draft.spec.hash), ("seed", str(self.seed))):
                    if metadata[key] != ours:
                        raise ArchspecError(
                            f"{path}: checkpoint of {key} {metadata[key]}, but this trial's {key} is {ours}"
                        )
                progress = Progress(**json.loads(metadata["progress"]))
                keys = ("param", *(MOMENTS if progress.step else ()))
                names = [f"{key}.{name}" for name, _ in self._named_trainable() for key in keys]
                tensors = {name: file.get_tensor(name).clone() for name in names}
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ArchspecError(f"{path}: not a checkpoint of this draft: {error}") from None
        for name, parameter in self._named_trainable():
            parameter.data.copy_(tensors[f"param.{name}"])
            self._optimizer.state[parameter] = {key: tensors[f"{key}.{name}"] for key in keys[1:]}
        self.progress = progress

    def _named_trainable(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, p) for name, p in self.draft.named_parameters() if p.requires_grad)
