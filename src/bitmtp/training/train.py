"""The training run: prepare, train within steps or a time budget, evaluate, export."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from bitmtp.errors import BitMTPError, ConfigError
from bitmtp.training.config import TrainConfig
from bitmtp.training.data import Batches
from bitmtp.training.export import export, packed_tensors
from bitmtp.training.frozen import bolted_tensors
from bitmtp.training.layout import Blocks, Layout, block_sizes, draw_anchors
from bitmtp.training.memory import check_memory
from bitmtp.training.model import Model, compile_layers
from bitmtp.training.objective import Metrics, fused_head
from bitmtp.training.prepare import Prepared, prepare
from bitmtp.training.report import Report
from bitmtp.training.schedule import blend_factor, rate_factor

QUICK_BATCHES = 2


def run(config: TrainConfig, *, stop_after: float = math.inf) -> bool:
    """Train as ``config`` says, going on from ``<output>/state.pt`` where it exists.

    Args: ``stop_after`` seconds from now, save the state and return (so does SIGTERM or SIGINT).
    Returns: whether the run is complete; then ``<output>/model`` holds the checkpoint, ``evaluation.json`` its figures.

    Raises:
        ConfigError, CheckpointError: bad input files. BitMTPError: the loss is no longer a number.
    """
    deadline = time.monotonic() + stop_after
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    report = Report(output)
    try:
        began = time.monotonic()
        prepared = prepare(config, device, report)
        trainer = Trainer(config, prepared, report)
        trainer.resume()
        report.say(f"prepared in {time.monotonic() - began:.1f} s")
        trainer.warm_up()
        if not trainer.train(deadline):
            report.say(f"stopped at {trainer.progress:.1%}; the same command goes on from there")
            return False
        trainer.finish()
        return True
    finally:
        report.close()


class Trainer:
    """State and steps of one run."""

    def __init__(self, config: TrainConfig, prepared: Prepared, report: Report) -> None:
        self.config, self.report = config, report
        self.student, self.objective, self.start = prepared.student, prepared.objective, prepared.start
        self.device = prepared.student.embedding.weight.device
        check_memory(self.student, config)
        self.heldout = prepared.heldout
        self.batches = Batches(prepared.corpus, seed=config.seed, batch_size=config.batch_size, seq_len=config.seq_len)
        self.optimiser = make_optimiser(self.student, config)
        self.blocks = Blocks(block_sizes(config), config.seq_len, self.student.dtype, self.device)
        self.blend = torch.zeros((), device=self.device)
        self.step, self.seconds = 0, 0.0
        if self.device.type == "cuda":
            torch._dynamo.config.recompile_limit = 64
            for model in self.objective.models:
                compile_layers(model)

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0 to 1."""
        if self.config.steps:
            return min(self.step / self.config.steps, 1.0)
        return min(self.seconds / self.config.time_budget_seconds, 1.0)

    def warm_up(self) -> None:
        """Compile every shape before the clock starts (nothing is learnt here)."""
        if self.device.type != "cuda":
            return
        began = time.monotonic()
        tokens = self._to_device(self.heldout[[0] * self.config.batch_size])
        self._forward(tokens, step=0).loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.zero_grad(set_to_none=True)
        self._evaluate_batch(tokens)
        torch.cuda.synchronize()
        self.report.say(f"compiled in {time.monotonic() - began:.1f} s")

    def train(self, deadline: float) -> bool:
        """Steps until the run is complete (True), or ``deadline`` (``time.monotonic``) or a signal comes (False)."""
        with _Signals() as signals:
            timers = _Timers(self.config)
            sums, counted, tokens_since = torch.zeros((), device=self.device), 0, time.monotonic()
            last = time.monotonic()
            while self.progress < 1:
                sums = sums + self.train_step()
                counted += 1
                now = time.monotonic()
                self.seconds, last = self.seconds + now - last, now
                self.report.advance(self.progress)
                if timers.due("log", now) or self.progress >= 1:
                    self._log((sums / counted).tolist(), counted / (time.monotonic() - tokens_since))
                    sums, counted, tokens_since = torch.zeros_like(sums), 0, time.monotonic()
                if timers.due("evaluate", now):
                    self._log_heldout(self.evaluate(QUICK_BATCHES))
                if timers.due("snapshot", now) and self.progress >= self.config.blend:
                    self.export("snapshot")
                stopping = signals.received or now >= deadline
                if timers.due("checkpoint", now) or stopping:
                    self.save()
                if stopping and self.progress < 1:
                    return False
        return True

    def train_step(self) -> Tensor:
        """One optimiser step; its metrics, still on the device."""
        self._apply_schedule()
        metrics = self._forward(self._to_device(self.batches.next()), self.step)
        metrics.loss.backward()  # type: ignore[no-untyped-call]
        clip_and_step(self.optimiser, self.config.clip)
        self.step += 1
        return metrics.stacked()

    def _apply_schedule(self) -> None:
        progress = self.progress
        self.blend.fill_(blend_factor(self.config, progress))
        factor = rate_factor(self.config, progress) * self.config.learning_rate
        for group in self.optimiser.param_groups:
            group["lr"] = factor * group["rate"]

    def _forward(self, tokens: Tensor, step: int) -> Metrics:
        self_target = self.progress >= self.config.self_target_start
        return self.objective(tokens, self._layout(step), self.blend, self_target=self_target)

    def _layout(self, step: int) -> Layout | None:
        if self.student.config.block_size == 1:
            return None
        return self.blocks.at(self._to_device(draw_anchors(self.config, step)))

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        values = torch.from_numpy(array)
        if self.device.type == "cuda":
            values = values.pin_memory()  # a copy from pageable memory would wait for the device
        return values.to(self.device, non_blocking=True).long()

    @torch.no_grad()
    def _evaluate_batch(self, tokens: Tensor) -> Tensor:
        # always the same anchors, so that evaluations compare
        return self.objective(tokens, self._layout(0), self.blend, self_target=True).stacked()

    def evaluate(self, limit: int | None = None) -> dict[str, float]:
        """Held-out metrics of the student (mask rows against its own next token), over ``limit`` batches or all."""
        size = min(self.config.batch_size, len(self.heldout))
        starts = range(0, len(self.heldout) - size + 1, size)[:limit]
        parts = [self._evaluate_batch(self._to_device(self.heldout[start : start + size])) for start in starts]
        return self._named(torch.stack(parts).mean(dim=0).tolist())

    @torch.no_grad()
    def teacher_loss(self) -> float:
        """Held-out next-token loss of the original model, nats, over the rows that :meth:`evaluate` reads."""
        size = min(self.config.batch_size, len(self.heldout))
        losses = []
        for start in range(0, len(self.heldout) - size + 1, size):
            tokens = self._to_device(self.heldout[start : start + size])
            original, head = self.objective.original(tokens[:, :-1])
            rows = original.flatten(0, 1)
            weight = torch.zeros(len(rows), device=self.device)
            labels = tokens[:, 1:].flatten()
            losses.append(fused_head(rows, head, rows, head, labels, weight, weight, self.config.head_chunk)[1].mean())
        return float(torch.stack(losses).mean())

    def _named(self, values: list[float]) -> dict[str, float]:
        return dict(zip(["loss", *self.objective.names], values, strict=True))

    def _log(self, values: list[float], steps_per_second: float) -> None:
        named = self._named(values)
        if not math.isfinite(named["loss"]):
            raise BitMTPError(f"step {self.step}: the loss is {named['loss']}; lower learning_rate, then run again")
        speed = steps_per_second * self.config.batch_size * self.config.seq_len
        named |= {"tokens_per_second": speed, "progress": self.progress, "seconds": self.seconds}
        self.report.values("train", self.step, named)
        self.report.say(f"{self.progress:6.1%}  step {self.step}  {_line(named)}  {speed:,.0f} tok/s")

    def _log_heldout(self, named: dict[str, float]) -> None:
        self.report.values("heldout", self.step, named)
        self.report.say(f"        held out     {_line(named)}")

    def export(self, name: str) -> None:
        """Write the student as ``<output>/name`` in the packed format."""
        start = self.start
        tensors = packed_tensors(self.student) if start is None else bolted_tensors(self.student, start)
        export(self.student.config, tensors, Path(self.config.output) / name, Path(self.config.tokenizer))

    def finish(self) -> None:
        """Export to ``<output>/model``, then evaluate on all held-out text."""
        self.save()
        self.export("model")
        self.blend.fill_(1.0)
        result = {**self.evaluate(), "teacher_ce": self.teacher_loss(), "steps": self.step, "seconds": self.seconds}
        result["tokens"] = self.step * self.config.batch_size * self.config.seq_len
        file = Path(self.config.output) / "evaluation.json"
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        self._log_heldout(result)
        own = "frozen" if self.start else f"{result['next_ce']:.4f}"
        self.report.say(f"held-out next-token loss {own}, original model {result['teacher_ce']:.4f}")

    def save(self) -> None:
        """Write ``<output>/state.pt``, whole or not at all. Anchors and data order are keyed, so no generator's state
        belongs to it."""
        file = Path(self.config.output) / "state.pt"
        state = {
            "method": self.config.method,
            "model": self.student.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "position": self.batches.position,
        }
        partial = file.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, file)

    def resume(self) -> None:
        """Go on from ``<output>/state.pt`` if it exists."""
        file = Path(self.config.output) / "state.pt"
        if not file.exists():
            return
        state: dict[str, Any] = torch.load(file, map_location=self.device, weights_only=True)
        if (method := state.get("method", "joint")) != self.config.method:
            raise ConfigError(f"{file}: of a run with method {method}; choose another output, or remove it")
        self.student.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.batches.position = tuple(state["position"])
        self.report.say(f"going on from step {self.step} ({self.progress:.1%})")


def _line(named: dict[str, float]) -> str:
    parts = [f"loss {named['loss']:.4f}"]
    if "next_ce" in named:
        parts.append(f"next {named['next_ce']:.4f} nats, {named['next_match']:.3f} as the original")
    kinds = [kind for kind in ("plain", "chain") if f"{kind}_1" in named]
    depths = [depth for depth in (1, 2, 3, 7, 15) if f"plain_{depth}" in named]
    agreements = (f"{depth}:" + "/".join(f"{named[f'{kind}_{depth}']:.2f}" for kind in kinds) for depth in depths)
    if kinds:
        parts.append(f"{'draft/chain' if 'chain' in kinds else 'draft'} {' '.join(agreements)}")
    return "  ".join(parts)


def make_optimiser(student: Model, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW: weight decay on the ternary matrices only; embedding, head and norms learn slower."""
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in student.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith(("mask_embedding", "medusa", "chain")):
            key = (1.0, 0.0)
        elif name.startswith("layers.") and parameter.dim() == 2:
            key = (1.0, config.weight_decay)
        else:
            key = (config.slow_factor, 0.0)
        groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": params, "rate": rate, "weight_decay": decay} for (rate, decay), params in groups.items()],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def clip_and_step(optimiser: torch.optim.AdamW, limit: float) -> None:
    """Clip gradients to a total norm of ``limit`` and step. A step whose norm is not finite is skipped."""
    gradients = [p.grad for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
    # read by the fused kernel, on the device: no wait
    optimiser.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


class _Timers:
    """Which periodic duty is due."""

    def __init__(self, config: TrainConfig) -> None:
        names = ("log", "evaluate", "snapshot", "checkpoint")
        self._every = {name: getattr(config, f"{name}_seconds") for name in names}
        self._last = dict.fromkeys(names, time.monotonic())

    def due(self, name: str, now: float) -> bool:
        if now - self._last[name] < self._every[name]:
            return False
        self._last[name] = now
        return True


class _Signals:
    """Notes SIGINT and SIGTERM while it is entered, so that the run can save its state first."""

    def __enter__(self) -> _Signals:
        self.received = False
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, *_: object) -> None:
        self.received = True

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
