"""The trainer: batches in a fixed order, exact resumption, metrics, and the drafter at the end.

A run folder holds `config.json` (what decides the result), `metrics.jsonl` (a line for every few
steps, and one for every evaluation), `checkpoint.pt` (all that resuming needs), `curves.png` and
`drafter/` (the drafter, as specdec loads it). What a step does depends on the configuration and its
number alone, so that a run that was killed gives what it would have given.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, set_seed
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor

from specdec.config import TargetConfig
from specdec.errors import SpecdecError
from specdec.params import Params, suggest, validate
from specdec.target import Target
from specdec.training.autoregressive import AutoregressiveRecipe
from specdec.training.eagle2 import Eagle2Recipe
from specdec.training.features import FeatureStore
from specdec.training.files import contents, differences, read_json, read_jsonl, write_atomically
from specdec.training.glide import GlideRecipe
from specdec.training.layers import check_output_layer
from specdec.training.losses import OutputRows
from specdec.training.optimizer import Kind, make_optimizer
from specdec.training.recipe import Batch, Outcome, Recipe, block_efficiency
from specdec.training.sequences import Text, batches, frequent_tokens, load_texts, split

RECIPES: dict[str, type[Recipe]] = {
    "eagle2": Eagle2Recipe,
    "glide": GlideRecipe,
    "autoregressive": AutoregressiveRecipe,
}
MOST_OVERFLOWS = 20
"""Steps in a row that may overflow: the scale begins at 2 ** 16 and is halved each time."""
DrafterChoice = Annotated[
    Eagle2Recipe.Params | GlideRecipe.Params | AutoregressiveRecipe.Params,
    Field(discriminator="name"),
]


class TrainConfig(Params):
    """What `specdec train` reads. Relative paths start where the command is run."""

    target: TargetConfig = Field(
        default_factory=lambda: TargetConfig.model_validate({}), description="the model to follow"
    )
    data: list[Path] = Field(min_length=1, description="folders that `specdec data` made")
    out: Path = Field(description="run folder")
    drafter: DrafterChoice = Field(description="the kind of drafter and its options")
    init_from: str | None = Field(
        None,
        description="begin with the weights of this drafter of the same kind and size: a folder, "
        "a hub id or a plugin's name",
    )
    draft_vocab: int | None = Field(
        8192, ge=1, description="learn only this many tokens, the most frequent ones; null for all"
    )
    features: Path | None = Field(
        None, description="folder for what the target computes; null keeps it in memory"
    )
    max_length: int = Field(
        768, ge=8, description="tokens of a text at most; what is behind is cut"
    )
    held_out: float = Field(0.02, ge=0, lt=1, description="share of the texts kept for evaluation")
    epochs: float = Field(2.0, gt=0, description="passes over the data")
    max_minutes: float | None = Field(
        None, gt=0, description="end earlier, after this time; the learning rate falls accordingly"
    )
    batch_tokens: int = Field(4096, ge=1, description="tokens of a batch at most, with padding")
    accumulation: int = Field(1, ge=1, description="batches whose gradients make one step")
    optimizer: Kind = Field(
        "muon", description="muon (for matrices, with adamw for the rest), or adamw for all"
    )
    learning_rate: float = Field(1.5e-3, gt=0, description="highest learning rate")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the run in which it rises")
    weight_decay: float = Field(0.01, ge=0, description="of the optimizer")
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    precision: Literal["no", "bf16", "fp16"] = Field("bf16", description="mixed precision")
    seed: int = Field(0, ge=0, description="of weights, order and noise")
    log_steps: int = Field(10, ge=1, description="steps between lines of metrics")
    checkpoint_steps: int = Field(
        200, ge=1, description="steps between checkpoints, each with an evaluation"
    )

    def record(self) -> dict[str, Any]:
        """What decides the result: a run folder is not continued with anything else."""
        free = {"target", "out", "features", "max_minutes", "log_steps", "checkpoint_steps"}
        decides = self.model_dump(mode="json", exclude=free)
        return {"target": {"model": self.target.model, "dtype": self.target.dtype}, **decides}


def check_drafter(document: dict[str, Any]) -> None:
    """Put the checked options in the place of the `drafter` section.

    Raises:
        SpecdecError: an unknown kind of drafter, or options that it does not have.
    """
    chosen = document.get("drafter")
    if isinstance(chosen, str):
        chosen = {"name": chosen}
    if not isinstance(chosen, dict) or "name" not in chosen:
        raise SpecdecError(f"drafter: name the kind of drafter. Allowed: {', '.join(RECIPES)}.")
    if chosen["name"] not in RECIPES:
        raise SpecdecError(
            f"drafter.name: cannot train '{chosen['name']}'. {suggest(str(chosen['name']), RECIPES)}"
        )
    document["drafter"] = validate(RECIPES[chosen["name"]].Params, chosen, "drafter")


@dataclass
class TrainProgress:
    """What a running training reports.

    Attributes:
        stage: "target" while the features are made, then "train".
        values: the newest line of metrics, if that is the news.
        held_out: the newest evaluation, if that is the news.
    """

    stage: str
    done: float
    values: dict[str, Any] = field(default_factory=dict)
    held_out: dict[str, Any] = field(default_factory=dict)


Report = Callable[[TrainProgress], None]


class Trainer:
    """Trains the drafter of a configuration.

    Raises:
        SpecdecError: no data, data of another target, a run folder of another configuration, a loss
            that is no number, a full disk. The last good checkpoint stays.
    """

    def __init__(self, config: TrainConfig, target: Target, report: Report | None = None) -> None:
        check_output_layer(target)
        self.config, self.target = config, target
        self.report = report or (lambda progress: None)
        # An earlier training in this process may have had another precision.
        AcceleratorState._reset_state()
        on_cpu = target.device.type == "cpu"
        self.accelerator = Accelerator(mixed_precision=config.precision, cpu=on_cpu)
        self.files = RunFolder(config.out, self.accelerator.is_main_process)
        texts = load_texts(config.data, config.max_length)
        # Steps are counted in batches of all processes together.
        made_of = {"texts": contents(texts), "processes": self.accelerator.num_processes}
        self.files.claim(config.record() | made_of)
        _check_ids(texts, target)
        self.texts, self.held_out = split(texts, config.held_out)
        if not self.texts:
            raise SpecdecError("all texts are held out: give more data, or a lower held_out")
        self.output = self._output_rows()
        set_seed(config.seed)
        recipe = RECIPES[config.drafter.name](
            config.drafter,
            target,
            self.output,
            config.seed,
        )
        recipe.requires_grad_(True)
        optimizer = make_optimizer(
            recipe.parameters(), config.optimizer, config.learning_rate, config.weight_decay
        )
        self.states = self._compute_states(recipe.layers)
        self.recipe = recipe
        self.module, self.optimizer = self.accelerator.prepare(recipe, optimizer)
        self.clock = Clock(config.max_minutes, self.accelerator)
        self.overflows = 0

    def run(self) -> Path:
        """Train to the end; returns the folder of the drafter."""
        plan = Plan(self.config, [len(text.ids) for text in self.texts], self._world)
        step = self._resume()
        sums = Sums()
        over = step >= plan.steps or self.clock.is_over()
        while not over:
            self._set_rate(max(step / plan.steps, self.clock.share()))
            sums.add(self._step(step, plan.at(step)), plan.tokens(step))
            step += 1
            over = step == plan.steps or self.clock.is_over()
            saves = step % self.config.checkpoint_steps == 0 or over
            # A line ends at every checkpoint: a run that goes on from there writes the same lines.
            if step % self.config.log_steps == 0 or saves:
                self._log(step, plan, sums)
                sums = Sums()
            if saves:
                self._evaluate(step, plan)
                self._save(step)
        return self._save_drafter()

    # --- one step --------------------------------------------------------------------------------

    def _step(self, step: int, parts: list[list[list[int]]]) -> Outcome:
        """One step of the optimizer over `parts`: for each micro-batch, the texts of each process."""
        total = sum(
            len(self.texts[index].trained) for part in parts for texts in part for index in texts
        )
        outcomes = []
        for number, part in enumerate(parts):
            own = part[self.accelerator.process_index]
            seed = hash_seed(self.config.seed, step, number, self.accelerator.process_index)
            last = number + 1 == len(parts)
            with _synchronised(self.accelerator, self.module, last):
                outcome = self.module(self._batch(own), seed)
                # Gradients are averaged over processes: the sum over all positions is wanted.
                self.accelerator.backward(outcome.loss * (self._world / total))
            outcomes.append(outcome)
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.config.clip)
        self._check_finite(step, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._gathered(outcomes)

    def _check_finite(self, step: int, norm: Tensor | None) -> None:
        """In fp16 the scaler leaves out a step that overflows, and tries a lower scale next."""
        finite = norm is None or bool(torch.isfinite(norm))
        self.overflows = 0 if finite else self.overflows + 1
        if self.overflows > (0 if self.accelerator.scaler is None else MOST_OVERFLOWS):
            raise SpecdecError(
                f"step {step + 1}: the loss or its gradient is not a finite number; the last "
                f"checkpoint in {self.config.out} is kept. Try a lower learning_rate, or precision no"
            )

    def _batch(self, indices: Sequence[int]) -> Batch:
        texts = [self.texts[index] for index in indices]
        batch = Batch.of(texts, [self.states[index] for index in indices])
        return batch.to(self.accelerator.device)

    def _gathered(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Sums over micro-batches and processes."""

        def total(values: list[Tensor]) -> Tensor:
            return self.accelerator.reduce(torch.stack(values).sum(0).detach().float(), "sum")

        return Outcome(
            loss=total([outcome.loss for outcome in outcomes]),
            positions=total([outcome.positions for outcome in outcomes]),
            count=total([outcome.count for outcome in outcomes]),
            agreed=total([outcome.agreed for outcome in outcomes]),
            acceptance=total([outcome.acceptance for outcome in outcomes]),
            chains=outcomes[0].chains[:0],
        )

    def _set_rate(self, progress: float) -> None:
        warmup = self.config.warmup
        if progress < warmup:
            share = (progress + 1e-3) / (warmup + 1e-3)
        else:
            share = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * max(share, 0.01)

    # --- metrics ---------------------------------------------------------------------------------

    def _log(self, step: int, plan: Plan, sums: Sums) -> None:
        values = {
            "step": step,
            "epoch": round(step / plan.steps_in_epoch, 4),
            "minutes": round(self.clock.minutes(), 3),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens_per_s": round(sums.tokens / max(time.monotonic() - sums.started, 1e-9), 1),
            **sums.means(),
        }
        self.files.append(values)
        done = max(step / plan.steps, self.clock.share())
        self.report(TrainProgress("train", done, values))

    @torch.no_grad()
    def _evaluate(self, step: int, plan: Plan) -> None:
        """Means over the held-out texts, and τ over those that were decoded greedily."""
        if not self.held_out:
            return
        sums, drafts = Sums(), []
        first = len(self.texts)
        lengths = [len(text.ids) for text in self.held_out]
        for number, indices in enumerate(batches(lengths, self.config.batch_tokens, "held out")):
            if number % self._world != self.accelerator.process_index:
                continue
            texts = [self.held_out[index] for index in indices]
            states = [self.states[first + index] for index in indices]
            for greedy in (True, False):
                chosen = [i for i, text in enumerate(texts) if text.greedy == greedy]
                if chosen:
                    batch = Batch.of([texts[i] for i in chosen], [states[i] for i in chosen])
                    outcome = self.recipe(batch.to(self.accelerator.device), None)
                    sums.add(outcome, 0)
                    if greedy:
                        drafts.append(outcome.chains.cpu())
        everything = self._everyone((sums, drafts))
        whole = sum((each for each, _ in everything), Sums())
        chains = [draft for _, each in everything for draft in each]
        values = {"step": step, "minutes": round(self.clock.minutes(), 3), "held_out": True}
        values |= whole.means()
        if chains:
            values["tau"] = round(block_efficiency(torch.cat(chains)), 4)
        self.files.append(values)
        self.report(TrainProgress("train", step / plan.steps, held_out=values))

    def _everyone(self, value: Any) -> list[Any]:
        from accelerate.utils import gather_object

        return list(gather_object([value]))

    # --- files -----------------------------------------------------------------------------------

    def _resume(self) -> int:
        path = self.config.out / "checkpoint.pt"
        state = self.files.load_checkpoint(path)
        if state is None:
            self.files.forget_after(0)
            if self.config.init_from is not None:
                self.recipe.begin_with(self.config.init_from)
            return 0
        self.recipe.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.clock.before = state["minutes"]
        self.files.forget_after(state["step"])
        return int(state["step"])

    def _save(self, step: int) -> None:
        if not self.accelerator.is_main_process:
            return
        scaler = self.accelerator.scaler
        state = {
            "step": step,
            "minutes": self.clock.minutes(),
            "drafter": self.recipe.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(self.config.out / "checkpoint.pt", buffer.getvalue())

    def _save_drafter(self) -> Path:
        folder = self.config.out / "drafter"
        if self.accelerator.is_main_process:
            try:
                self.recipe.save(folder)
            except (OSError, SafetensorError) as error:
                raise SpecdecError(f"cannot write {folder}: {error}") from error
            if self.output.ids is not None:
                ids = json.dumps(self.output.ids.tolist(), separators=(",", ":"))
                write_atomically(folder / "draft_vocab.json", ids)
        self.accelerator.wait_for_everyone()
        return folder

    # --- before the first step -------------------------------------------------------------------

    @property
    def _world(self) -> int:
        return self.accelerator.num_processes

    def _output_rows(self) -> OutputRows:
        size, config = self.config.draft_vocab, self.target.config
        ids = None
        if size is not None and size < config.vocab_size:
            ids = torch.tensor(frequent_tokens(self.texts, size), device=self.target.device)
        dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        layer = self.target.model.get_output_embeddings()
        return OutputRows.of(layer, ids, dtype[self.config.precision])

    def _compute_states(self, layers: tuple[int, ...]) -> FeatureStore:
        accelerator = self.accelerator
        states = FeatureStore(
            self.target,
            [*self.texts, *self.held_out],
            layers,
            self.config.features,
            share=(accelerator.process_index, accelerator.num_processes),
            report=lambda done, total: self.report(TrainProgress("target", done / total)),
        )
        accelerator.wait_for_everyone()
        return states


class Plan:
    """Which texts each step trains on: `at(step)` gives, for each micro-batch, each process's."""

    def __init__(self, config: TrainConfig, lengths: list[int], world: int) -> None:
        self.config, self.lengths = config, lengths
        self.group = world * config.accumulation
        self.world = world
        self._epoch, self._order = -1, self._batches(0)
        self.steps_in_epoch = max(1, len(self._order) // self.group)
        self.steps = max(1, round(self.steps_in_epoch * config.epochs))

    def at(self, step: int) -> list[list[list[int]]]:
        epoch, place = divmod(step, self.steps_in_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._batches(epoch)
        chosen = [
            self._order[(place * self.group + i) % len(self._order)] for i in range(self.group)
        ]
        return [chosen[start : start + self.world] for start in range(0, self.group, self.world)]

    def tokens(self, step: int) -> int:
        return sum(
            self.lengths[index] for part in self.at(step) for texts in part for index in texts
        )

    def _batches(self, epoch: int) -> list[list[int]]:
        seed = f"{self.config.seed}/{epoch}"
        return batches(self.lengths, self.config.batch_tokens, seed)


class Sums:
    """Outcomes added up, until they are written as means."""

    def __init__(self) -> None:
        self.started, self.tokens = time.monotonic(), 0
        self.loss = self.positions = 0.0
        self.count = self.agreed = self.acceptance = torch.zeros(1)

    def add(self, outcome: Outcome, tokens: int) -> None:
        self.tokens += tokens
        self.loss += float(outcome.loss)
        self.positions += float(outcome.positions)
        self.count = self.count + outcome.count.cpu()
        self.agreed = self.agreed + outcome.agreed.cpu()
        self.acceptance = self.acceptance + outcome.acceptance.cpu()

    def __add__(self, other: Sums) -> Sums:
        both = Sums()
        both.loss = self.loss + other.loss
        both.positions = self.positions + other.positions
        both.count = self.count + other.count
        both.agreed = self.agreed + other.agreed
        both.acceptance = self.acceptance + other.acceptance
        return both

    def means(self) -> dict[str, Any]:
        count = self.count.clamp_min(1)
        return {
            "loss": round(self.loss / max(self.positions, 1), 5),
            "agreement": [round(value, 4) for value in (self.agreed / count).tolist()],
            "acceptance": [round(value, 4) for value in (self.acceptance / count).tolist()],
        }


class Clock:
    """Minutes of training, those before a resumption included; the same in all processes."""

    def __init__(self, limit: float | None, accelerator: Accelerator) -> None:
        self.limit, self.accelerator = limit, accelerator
        self.before, self.started = 0.0, time.monotonic()

    def minutes(self) -> float:
        return self.before + (time.monotonic() - self.started) / 60

    def share(self) -> float:
        """How much of the limit is over, 0 without one."""
        if self.limit is None:
            return 0.0
        shared = [self.minutes() / self.limit]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(shared)
        return min(1.0, shared[0])

    def is_over(self) -> bool:
        return self.share() >= 1.0


class RunFolder:
    """The files of a run that the main process writes."""

    def __init__(self, folder: Path, writes: bool) -> None:
        self.folder, self.writes = folder, writes

    def claim(self, record: dict[str, Any]) -> None:
        """Refuse a folder that holds another configuration's run."""
        path = self.folder / "config.json"
        if path.exists():
            named = differences(read_json(path), record)
            if named:
                raise SpecdecError(
                    f"{self.folder} holds a run with another configuration ({named}): continue with "
                    "that one, or name another folder"
                )
        elif self.writes:
            write_atomically(path, json.dumps(record, indent=1))

    def append(self, values: dict[str, Any]) -> None:
        if not self.writes:
            return
        path = self.folder / "metrics.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise SpecdecError(f"cannot write {path}: {error.strerror}") from error

    def forget_after(self, step: int) -> None:
        """Drop the metrics of steps that are done again after a resumption."""
        path = self.folder / "metrics.jsonl"
        if not self.writes or not path.exists():
            return
        kept = [row for row in _whole_rows(path) if row["step"] <= step]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))

    @staticmethod
    def load_checkpoint(path: Path) -> dict[str, Any] | None:
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise SpecdecError(f"cannot read the checkpoint {path}: {error}") from error
        return state


def _whole_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file; a kill may have cut its last one."""
    try:
        yield from read_jsonl(path)
    except SpecdecError:
        return


def hash_seed(*parts: int) -> int:
    """One seed from several numbers."""
    mixed = 0
    for part in parts:
        mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
    return mixed


def _synchronised(accelerator: Accelerator, module: Any, last: bool) -> Any:
    """Gradients are exchanged with the last micro-batch of a step only."""
    from contextlib import nullcontext

    return nullcontext() if last else accelerator.no_sync(module)


def _check_ids(texts: Sequence[Text], target: Target) -> None:
    highest = max(max(text.ids) for text in texts)
    if highest >= target.vocab_size:
        raise SpecdecError(
            f"the data holds token {highest}, and the target's vocabulary ends at "
            f"{target.vocab_size - 1}: this data was made with another target"
        )
