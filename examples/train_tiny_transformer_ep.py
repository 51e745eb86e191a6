"""Train a small language model on Python's own sources, on a 2 x 2 grid of expert and data parallelism.

Four ranks. The two of a *row* share one set of four experts, two each, and exchange tokens (expert parallel).
The two of a *column* own the same experts and average their gradients (data parallel). Everything else is
replicated on all four, and each rank has its own part of every batch:

            column 0       column 1
    row 0   rank 0         rank 1        experts 0 1 | 2 3
    row 1   rank 2         rank 3        experts 0 1 | 2 3

The text is the standard library's, so there is nothing to download; the model reads and predicts bytes.
The loss has to fall below 2.6 nats a byte (knowing nothing is ln 128 = 4.85) in 120 steps. ``--check`` then
trains the same model in one process, without communication, and compares the two loss curves. Both compute
in float64: a router's choice is a step function, and rounding would sooner or later send some token
elsewhere.

    python examples/train_tiny_transformer_ep.py [--steps 120] [--check] [--url tcp://127.0.0.1:0]
    ruda-async run -n 4 examples/train_tiny_transformer_ep.py [--steps 120] [--check]
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ruda_async
from ruda_async import moe, training

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 128, 32, 48, 4, 2
EXPERTS, CHOSEN, HIDDEN = 4, 2, 64
RANKS, ROW = 4, 2
BATCH, LEARNING_RATE, MAX_NORM = 32, 4e-3, 1.0
SEED = 7
#: What the last ten steps' mean loss has to be below, in nats a byte, after at least 120 steps.
TARGET, TARGET_STEPS = 2.6, 120
#: How far apart the two loss curves may be at any step, relatively.
BOUND = 1e-9
FILES = ("argparse.py", "ast.py", "calendar.py", "configparser.py", "difflib.py", "inspect.py", "typing.py")


# ---------------------------------------------------------------------- the model


class Experts(nn.Module):
    """A layer of sharded experts, replicated over columns; all of them where `row` is None."""

    def __init__(self, row: Any) -> None:
        super().__init__()
        self.row = row
        self.layout = moe.ExpertLayout.even(EXPERTS, 1 if row is None else row.world_size)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        # Every rank makes all of them, so that all draw the same numbers, and keeps its own.
        every = [
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(EXPERTS)
        ]
        self.own = nn.ModuleList(every[n] for n in self.layout.local(0 if row is None else row.rank))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        if self.row is None:
            mixed = moe.reference(tokens, self.router(tokens), list(self.own), CHOSEN)
        else:
            mixed = moe.moe_layer(
                self.row, tokens, self.router(tokens), moe.per_expert(list(self.own)), self.layout, CHOSEN
            )
        return mixed.view_as(x)


class Block(nn.Module):
    """Causal self-attention, then experts."""

    def __init__(self, row: Any) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.experts = Experts(row)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        result: Tensor = x + self.experts(self.between(x))
        return result


class Decoder(nn.Module):
    """Bytes ``[batch, length]`` to scores of the next byte ``[batch, length, 128]``."""

    def __init__(self, row: Any) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(row) for _ in range(LAYERS))
        self.after = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.scores(self.after(x))
        return result

    def expert_parameters(self) -> list[nn.Parameter]:
        """Those that only a column replicates."""
        return [p for block in self.blocks for p in block.experts.own.parameters()]


def loss_of(model: Decoder, text: Tensor) -> Tensor:
    """The mean of the next byte's cross entropy; ``[batch, CONTEXT + 1]``."""
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


# ---------------------------------------------------------------------- the text


def load_text() -> Tensor:
    """Some modules of the standard library, as bytes below 128."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / name).read_bytes() for name in FILES)
    return torch.tensor([byte for byte in text if byte < VOCABULARY])


def batches(text: Tensor, steps: int) -> list[Tensor]:
    """Random windows ``[BATCH, CONTEXT + 1]``, the same in every process."""
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.randint(len(text) - CONTEXT, (steps, BATCH, 1), generator=generator)
    return list(text[starts + torch.arange(CONTEXT + 1)])


# ---------------------------------------------------------------------- training


def train_rank(steps: int) -> list[float]:
    """What every rank runs; the losses of the whole batches."""
    torch.set_num_threads(1)
    text = load_text()
    with ruda_async.sync.connect(timeout=120) as comm:
        if comm.world_size != RANKS:
            raise SystemExit(
                f"the grid is {RANKS // ROW} x {ROW}: start {RANKS} ranks, not {comm.world_size}"
            )
        row, column = comm.split(comm.rank // ROW), comm.split(comm.rank % ROW)
        model = Decoder(row)
        experts = model.expert_parameters()
        others = [p for p in model.parameters() if all(p is not q for q in experts)]
        gradients = training.GradientSync(model, comm, groups=[(experts, column)], bucket_bytes=64 * 1024)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        losses = []
        start = time.perf_counter()
        for number, batch in enumerate(batches(text, steps), 1):
            optimizer.zero_grad()
            loss = loss_of(model, batch.chunk(RANKS)[comm.rank])
            gradients.backward(loss)
            training.clip_grad_norm_(others, MAX_NORM, comm, sharded=experts, shard_comm=row)
            optimizer.step()
            losses.append(comm.all_reduce(loss.detach(), "mean").item())
            if comm.rank == 0 and (number % 20 == 0 or number == 1):
                print(f"  step {number:4d} of {steps}   loss {losses[-1]:.4f}", flush=True)
        if comm.rank == 0:
            seconds, stats = time.perf_counter() - start, gradients.stats()
            print(
                f"{1000 * seconds / steps:.0f} ms a step; gradients were under way for {stats.in_flight:.2f} "
                f"s, of which {stats.overlapped:.2f} s behind backward"
            )
        return losses


def train_alone(steps: int) -> list[float]:
    """The reference: the same model in this process."""
    torch.set_num_threads(1)
    model = Decoder(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches(load_text(), steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


def judge(losses: list[float], check: bool) -> int:
    """Print what came of it; the exit code."""
    last = sum(losses[-10:]) / len(losses[-10:])
    print(f"loss                    {losses[0]:.4f} at first, {last:.4f} at last (mean of ten steps)")
    failures = []
    if len(losses) >= TARGET_STEPS and not last < TARGET:
        failures.append(f"the loss did not fall below {TARGET}")
    if check:
        alone = train_alone(len(losses))
        difference = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
        print(
            f"against one process     {difference:.1e} largest relative difference in loss (bound "
            f"{BOUND:.0e})"
        )
        if not difference <= BOUND:
            failures.append("the loss curve differs from the one-process run's")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small language model on a 2 x 2 grid of ranks.")
    parser.add_argument("--steps", type=int, default=TARGET_STEPS)
    parser.add_argument("--url", default="tcp://127.0.0.1:0", help="the transport between the ranks")
    parser.add_argument("--check", action="store_true", help="compare with a run in one process")
    options = parser.parse_args()
    if os.environ.get("RUDA_RANK"):  # a launcher started the ranks, and this is one of them
        losses = train_rank(options.steps)
        return judge(losses, options.check) if os.environ["RUDA_RANK"] == "0" else 0
    print(f"{RANKS} ranks over {options.url}, {options.steps} steps", flush=True)
    curves: list[list[float]] = ruda_async.spawn(train_rank, RANKS, url=options.url, args=(options.steps,))
    return judge(curves[0], options.check)


if __name__ == "__main__":
    raise SystemExit(main())
