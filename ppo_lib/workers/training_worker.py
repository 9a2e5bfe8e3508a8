"""What every model on a rank does: compute numbers for a batch of rows, and take optimizer steps on its mini-batches.

Both work on packed micro-batches and give results that do not depend on how the rows were divided, over micro-batches
or over ranks: a loss is a sum of contributions, each already divided by the denominators of its whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn

from ppo_lib.algorithms import Denominators
from ppo_lib.algorithms.metric import Metric, Reduction
from ppo_lib.errors import BatchMismatchError
from ppo_lib.workers.fsdp_engine import FSDPEngine, StepReport
from ppo_lib.workers.metrics import StepMetrics
from ppo_lib.workers.packing import JaggedRows, MicroBatching, PackedRows, filler_rows, pack_rows, plan_micro_batches
from ppo_lib.workers.performance import Arithmetic, Meter

__all__ = ["Forward", "LossFunction", "Observe", "OfMiniBatch", "Tokens", "TrainingWorker"]

Forward: TypeAlias = Callable[[nn.Module, PackedRows], dict[str, torch.Tensor]]
"""(root module, packed rows) -> flat (M) results for their response tokens."""
LossFunction: TypeAlias = Callable[
    [dict[str, torch.Tensor], dict[str, torch.Tensor], Denominators, Any], tuple[torch.Tensor, dict[str, Any]]
]
"""(outputs (b, r), columns (b, r), denominators, found) -> (loss, metrics), all contributions to their mini-batch; a
metric may also be a `Metric`, which says itself how it is reduced. `found` is what `OfMiniBatch` returned for the
mini-batch, None without one."""


@dataclass(frozen=True)
class Tokens:
    """All tokens of a mini-batch with response_mask 1, over all ranks, row by row: the same on every rank."""

    outputs: dict[str, torch.Tensor]
    """What the model gave for them, (N,) each, without gradient."""
    columns: dict[str, torch.Tensor]
    """What came with them, (N,) each."""
    lengths: torch.Tensor
    """How many of them each row has, (rows,) int64."""


OfMiniBatch: TypeAlias = Callable[[Tokens, Denominators], tuple[Any, Denominators]]
"""Before the losses of a mini-batch are taken: what a loss has to know of all of it, and what to divide by then."""
Observe: TypeAlias = Callable[[Tokens], None]
"""After the step of a mini-batch: to measure its tokens, as they were for the losses."""


_OVER_RANKS: dict[Reduction, Any] = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "last": None,
}


MicroBatch: TypeAlias = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Outputs and columns of some rows, (b, r) each."""


@dataclass(frozen=True)
class MiniBatchResult:
    """What one mini-batch came to."""

    metrics: dict[str, Metric]
    report: StepReport
    learns: bool
    """Whether it had a token to learn from."""


class TrainingWorker:
    """Runs one engine over batches of jagged rows."""

    def __init__(self, engine: FSDPEngine) -> None:
        """Work with this engine; what a call computes and how large its micro-batches are comes with the call."""
        self.engine = engine
        precision = engine.precision
        dtype = precision.autocast_dtype or precision.param_dtype or torch.float32
        self.meter = Meter(Arithmetic.of(engine.module), engine.device, dtype)

    # --------------------------------------------------------------------------------------------------- inference

    def infer_batch(self, data: TensorDict, forward: Forward, size: MicroBatching) -> TensorDict:
        """Compute response columns without gradient.

        Args:
            data: jagged rows, see `JaggedRows`.
            forward: what to compute.
            size: bound of a micro-batch.

        Returns:
            A TensorDict of the same rows: each result of `forward` as jagged (B, r_i) float32 on the CPU.
        """
        batch = JaggedRows(data)
        plan = self._plan([list(range(len(batch)))], batch, size, training=False)[0]
        flat: dict[str, torch.Tensor] = {}
        with self.meter.measuring("infer") as work, self.engine.inference() as module:
            for rows in plan:
                packed = pack_rows(batch, rows, self.engine.device) if rows else filler_rows(self.engine.device)
                work.operations += self.meter.forward(packed)
                for name, values in forward(module, packed).items():
                    if name not in flat:
                        flat[name] = torch.zeros(int(batch.response_offsets[-1]), dtype=torch.float32)
                    if rows:
                        flat[name].index_copy_(0, packed.flat_index, values.float().cpu())
        columns = {name: batch.as_jagged(values) for name, values in flat.items()}
        return TensorDict(columns, batch_size=[len(batch)])

    # ---------------------------------------------------------------------------------------------------- training

    def train(
        self,
        data: TensorDict,
        forward: Forward,
        loss_fn: LossFunction,
        columns: list[str],
        size: MicroBatching,
        *,
        horizon: float | None,
        of_mini_batch: OfMiniBatch | None = None,
        observe: Observe | None = None,
        epochs: int = 1,
        shuffle_seed: int | None = None,
    ) -> StepMetrics:
        """Visit every mini-batch once an epoch, one optimizer step each.

        Args:
            data: jagged rows with `response_mask`, `mini_batch` (B) and the non-tensors `mini_batch_num_tokens` and
                `mini_batch_num_seqs`, which count over all ranks. A rank may hold any part of a mini-batch, also none.
            forward: what the loss needs from the model.
            loss_fn: the loss of a micro-batch, as its contribution to the mini-batch.
            columns: response columns the loss needs besides `response_mask`.
            size: bound of a micro-batch.
            horizon: constant length that `seq-mean-token-sum-norm` divides by.
            of_mini_batch: what the loss has to find out from a whole mini-batch. It costs a forward pass more, but for
                mini-batches that are one micro-batch on one rank.
            observe: sees the tokens of each mini-batch.
            epochs: passes over the mini-batches.
            shuffle_seed: visit them in an order drawn from this seed, anew each epoch; None in ascending order.

        Returns:
            The loss's metrics and `grad_norm` averaged over the mini-batches that have a token to learn from (zeros if
            none has), `lr` of the last one, how many have none (`empty_mini_batches`), and how many steps were left
            out because their gradient was not finite (`nonfinite_grad_steps`).
        """
        batch = JaggedRows(data)
        flat = {name: batch.column(name) for name in ["response_mask", *columns]}
        tokens: list[float] = batch.need("mini_batch_num_tokens")
        seqs: list[float] = batch.need("mini_batch_num_seqs")
        members = _members(batch, batch.need("mini_batch").tolist(), len(tokens), flat["response_mask"])
        plans = self._plan(members, batch, size, training=True)

        results: list[MiniBatchResult] = []
        generator = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
        with self.meter.measuring("train"), self.engine.training() as module:
            for _ in range(epochs):
                order = range(len(plans)) if generator is None else torch.randperm(len(plans), generator=generator)
                for k in map(int, order):
                    whole = Denominators(tokens[k], seqs[k], horizon)
                    results.append(
                        self.train_mini_batch(
                            module, batch, plans[k], flat, forward, loss_fn, whole, of_mini_batch, observe
                        )
                    )
        return _step_metrics(results)

    def train_mini_batch(
        self,
        module: nn.Module,
        batch: JaggedRows,
        plan: list[list[int]],
        flat: dict[str, torch.Tensor],
        forward: Forward,
        loss_fn: LossFunction,
        denominators: Denominators,
        of_mini_batch: OfMiniBatch | None = None,
        observe: Observe | None = None,
    ) -> MiniBatchResult:
        """One optimizer step; the metrics it returns are those of the whole mini-batch, over all ranks."""
        engine, found = self.engine, None

        def passes() -> Iterator[MicroBatch]:
            return (self._micro_batch(module, batch, rows, flat, forward) for rows in plan)

        alone = len(plan) == 1 and dist.get_world_size() == 1  # then one pass serves for looking and for training
        training = list(passes()) if alone else passes()
        if of_mini_batch is not None:
            with torch.no_grad():
                found, denominators = of_mini_batch(_whole(map(_kept, training if alone else passes())), denominators)
        seen: list[Tokens] = []
        total: dict[str, Metric] = {}
        for index, (rows, (outputs, given)) in enumerate(zip(plan, training)):
            loss, metrics = loss_fn(outputs, given, denominators, found)
            engine.backward(loss, last=index == len(plan) - 1)
            if observe is not None:
                seen.append(_kept((outputs, given)))
            for name, value in metrics.items():
                part = Metric.of(value) if rows else Metric.of(value).of_nothing()
                total[name] = total[name].with_part(part) if name in total else part
        if observe is not None:
            observe(_whole(seen))
        learns = denominators.num_tokens > 0
        return MiniBatchResult(self._over_ranks(total), engine.step(apply=learns), learns)

    def _micro_batch(
        self, module: nn.Module, batch: JaggedRows, rows: list[int], flat: dict[str, torch.Tensor], forward: Forward
    ) -> MicroBatch:
        """Outputs and columns of some rows, (b, r) each.

        Without rows it is a filler: its columns are all zero, its mask too, so that it contributes an exact zero.
        """
        packed = pack_rows(batch, rows, self.engine.device) if rows else filler_rows(self.engine.device)
        self.meter.work["train"].operations += self.meter.forward(packed)
        if torch.is_grad_enabled():
            self.meter.work["train"].operations += self.meter.backward(packed)
        with self.engine.precision.autocast():
            outputs = forward(module, packed)
        padded = {name: packed.to_rows(values) for name, values in outputs.items()}
        return padded, {name: packed.gather(x) if rows else _blank(packed, x) for name, x in flat.items()}

    def _over_ranks(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """The same over all ranks; of reduction `last` is what this rank has."""
        result: dict[str, Metric] = {}
        for reduction, operation in _OVER_RANKS.items():
            names = sorted(name for name, metric in metrics.items() if metric.reduction == reduction)
            if names:
                like = torch.zeros((), dtype=torch.float64, device=self.engine.device)
                stacked = torch.stack([torch.as_tensor(metrics[name].value).to(like) for name in names])
                if operation is not None and dist.get_world_size() > 1:
                    dist.all_reduce(stacked, op=operation)
                result |= {name: Metric(value, reduction) for name, value in zip(names, stacked.tolist())}
        return result

    def _plan(
        self, groups: list[list[int]], batch: JaggedRows, size: MicroBatching, training: bool
    ) -> list[list[list[int]]]:
        """Micro-batches of each group of rows, equally many on every rank: their collectives must meet."""
        size = size.on(self.engine.device, max(batch.lengths, default=0), training)

        def plan_of(rows: list[int], at_least: int = 0) -> list[list[int]]:
            lengths, prompts = [batch.lengths[row] for row in rows], [batch.prompts[row] for row in rows]
            return plan_micro_batches(lengths, size, at_least, prompts)

        own = [plan_of(rows) for rows in groups]
        counts = torch.tensor([max(1, len(plan)) for plan in own], device=self.engine.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        plans = []
        for rows, plan, count in zip(groups, own, counts.tolist()):
            if len(plan) < count:
                plan = plan_of(rows, at_least=count)
            plans.append([[rows[i] for i in micro] for micro in plan])
        return plans


def _members(batch: JaggedRows, mini_batch: list[int], count: int, mask: torch.Tensor) -> list[list[int]]:
    """Rows of each mini-batch; those without a single token that counts are left out, they cannot change anything."""
    members: list[list[int]] = [[] for _ in range(count)]
    before = torch.nn.functional.pad(mask.ne(0).cumsum(0), (1, 0))  # tokens that count before each position
    kept = before[batch.response_offsets].diff().tolist()
    for row, k in enumerate(mini_batch):
        if not 0 <= k < count:
            raise BatchMismatchError(f"row {row} is in mini-batch {k}, but there are denominators for {count}")
        if kept[row]:
            members[k].append(row)
    return members


def _step_metrics(results: list[MiniBatchResult]) -> StepMetrics:
    """The metrics of a call; mini-batches without a token to learn from are in no mean, unless there are no others."""
    metrics = StepMetrics()
    for result in [result for result in results if result.learns] or results:
        for name, metric in result.metrics.items():
            metrics.add(metric.reduction, {name: metric.value})
        metrics.add("mean", {"grad_norm": result.report.grad_norm})
    for result in results:
        metrics.add("last", {"lr": result.report.lr})
        metrics.add("sum", {"nonfinite_grad_steps": float(result.report.skipped)})
        metrics.add("sum", {"empty_mini_batches": float(not result.learns)})
    return metrics


def _kept(micro_batch: MicroBatch) -> Tokens:
    """The tokens of a micro-batch that count."""
    outputs, given = micro_batch
    kept = given["response_mask"].bool()
    return Tokens(
        {name: values.detach()[kept] for name, values in outputs.items()},
        {name: values[kept] for name, values in given.items()},
        kept.sum(dim=1),
    )


def _whole(parts: Iterable[Tokens]) -> Tokens:
    """The tokens of all micro-batches, over all ranks."""
    parts = list(parts)

    def joined(columns: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: _gathered(torch.cat([part[name] for part in columns])) for name in columns[0]}

    return Tokens(
        joined([part.outputs for part in parts]),
        joined([part.columns for part in parts]),
        _gathered(torch.cat([part.lengths for part in parts])),
    )


def _gathered(values: torch.Tensor) -> torch.Tensor:
    """The (n,) of every rank, one after the other, on every rank."""
    if dist.get_world_size() == 1:
        return values
    counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(values)], device=values.device))
    width = int(torch.cat(counts).max())
    padded = [values.new_zeros(width) for _ in counts]
    dist.all_gather(padded, torch.nn.functional.pad(values, (0, width - len(values))))
    return torch.cat([part[: int(count)] for part, count in zip(padded, counts)])


def _blank(packed: PackedRows, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, *packed.response_lens, dtype=like.dtype, device=packed.labels.device)
