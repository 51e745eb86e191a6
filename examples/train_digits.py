"""Train a small mixture-of-experts classifier on handwritten digits, its experts sharded over ranks.

Four processes talk over TCP. The *router* and the layers around it are replicated: every rank has a copy
and computes its shard of each batch with it. The eight *experts* are sharded: each rank owns two. A step is

    input layer → router → dispatch → experts → combine → output layer → loss

where *dispatch* sends every token (here: one image) to the ranks of its two experts, and *combine* brings
the experts' answers home. Both are one uneven all-to-all. It is capacity-free: no token is ever dropped,
however many choose the same expert. Backward makes the same exchanges in reverse, and one all-reduce adds
up the gradients of the replicated parameters. All communication is written out below, in `ShardedExperts`
and `sharded_step`.

Afterwards one process trains the same model on the whole batches, with plain autograd and no
communication, and the two loss curves have to agree to within float32 rounding. Both compute in float64:
a router's choice is a step function, so with a rounding error of float32 in the middle of training some
token, sooner or later, would pick another expert in one of the runs, and the curves would drift apart.

    python examples/train_digits.py [--epochs 15] [--ranks 4] [--url tcp://127.0.0.1:0] [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import ruda_async
from ruda_async import Communicator

EXPERTS, CHOSEN = 8, 2  # experts in all, and how many of them each token visits
PIXELS, WIDTH, HIDDEN, CLASSES = 64, 64, 64, 10
BATCH, LEARNING_RATE, MOMENTUM = 128, 0.1, 0.9
SEED = 2024
REPLICATED = ("w_in", "b_in", "router", "w_out", "b_out")
SHARDED = ("expert_up", "expert_down")
#: How far apart the loss curves may be, at any step, relative to the one-process run: float32 rounding.
BOUND = 2.0**-23
#: The least share of held-out images that must be classified right.
ACCURACY = 0.95

Parameters = dict[str, torch.Tensor]


# ---------------------------------------------------------------------- the model


def initial_parameters() -> Parameters:
    """All parameters, float64, the same in every process because the seed is."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-2] ** -0.5

    return {
        "w_in": normal(PIXELS, WIDTH),
        "b_in": torch.zeros(WIDTH, dtype=torch.float64),
        "router": normal(WIDTH, EXPERTS),
        "w_out": normal(WIDTH, CLASSES),
        "b_out": torch.zeros(CLASSES, dtype=torch.float64),
        "expert_up": normal(EXPERTS, WIDTH, HIDDEN),
        "expert_down": normal(EXPERTS, HIDDEN, WIDTH),
    }


def route(p: Parameters, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The router: each token's chosen experts and their weights, both ``[tokens, CHOSEN]``."""
    weights, chosen = torch.softmax(tokens @ p["router"], dim=1).topk(CHOSEN, dim=1)
    return weights / weights.sum(dim=1, keepdim=True), chosen


def expert(p: Parameters, index: int, rows: torch.Tensor) -> torch.Tensor:
    """One expert, a two-layer perceptron: ``[rows, WIDTH]`` to the same shape."""
    return torch.relu(rows @ p["expert_up"][index]) @ p["expert_down"][index]


def loss_of(p: Parameters, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The output layer and cross entropy; a sum over tokens divided by the whole batch's size."""
    return functional.cross_entropy(tokens @ p["w_out"] + p["b_out"], labels, reduction="sum") / BATCH


class Sgd:
    """Gradient descent with momentum, and a rate that falls to zero in a straight line."""

    def __init__(self, p: Parameters, steps: int) -> None:
        self.parameters = p
        self.rate, self.fall = LEARNING_RATE, LEARNING_RATE / steps
        self.velocity = {name: torch.zeros_like(value) for name, value in p.items()}
        for value in p.values():
            value.requires_grad_()

    @torch.no_grad()
    def step(self) -> None:
        for name, value in self.parameters.items():
            self.velocity[name].mul_(MOMENTUM).add_(value.grad)
            value.sub_(self.velocity[name], alpha=self.rate)
            value.grad = None
        self.rate -= self.fall


# ---------------------------------------------------------------------- the sharded form


@dataclass
class Timed:
    """A communicator with a stopwatch."""

    comm: Communicator
    seconds: float = 0.0

    def __call__(self, call: str, *args: Any) -> Any:
        """Make one collective call and add its time."""
        start = time.perf_counter()
        result = getattr(self.comm, call)(*args)
        self.seconds += time.perf_counter() - start
        return result


class ShardedExperts:
    """The experts' layer of one batch shard: dispatch, local experts, combine, and the way back."""

    def __init__(self, exchange: Timed, p: Parameters, tokens: torch.Tensor) -> None:
        self.exchange = exchange
        self.tokens = tokens
        weights, chosen = route(p, tokens)
        # One row per assignment of a token to an expert, sorted by expert and so by the rank that owns it.
        experts, order = chosen.flatten().sort(stable=True)
        self.token_of_row = order // CHOSEN
        self.weight_of_row = weights.flatten()[order]
        local = len(p["expert_up"])
        self.send_counts = torch.bincount(experts // local, minlength=exchange.comm.world_size).tolist()

        # Dispatch. What arrives is a leaf of this rank's own graph.
        self.sent = tokens[self.token_of_row]
        arrived = exchange("all_to_all_v_float", self.sent.detach(), self.send_counts)
        self.arrived = arrived.value.requires_grad_()
        self.receive_counts = arrived.receive_counts
        self.visits = exchange("all_to_all_v_int", experts, self.send_counts).value % local

        # The experts that live here.
        self.answers = torch.zeros_like(self.arrived)
        for index in range(local):
            rows = (self.visits == index).nonzero().flatten()
            self.answers = self.answers.index_add(0, rows, expert(p, index, self.arrived[rows]))

        # The way home: the same exchange with the counts reversed.
        home = exchange("all_to_all_v_float", self.answers.detach(), self.receive_counts)
        self.returned = home.value.requires_grad_()

    def combine(self) -> torch.Tensor:
        """Add every token's weighted answers to the token itself."""
        return self.tokens.index_add(0, self.token_of_row, self.weight_of_row[:, None] * self.returned)

    def backward(self) -> None:
        """Send the gradients the way the activations came, after ``loss.backward()``."""
        call = "all_to_all_v_float"
        self.answers.backward(self.exchange(call, self.returned.grad, self.send_counts).value)
        self.sent.backward(self.exchange(call, self.arrived.grad, self.receive_counts).value)


def input_layer(p: Parameters, images: torch.Tensor) -> torch.Tensor:
    """Images ``[n, PIXELS]`` to tokens ``[n, WIDTH]``."""
    return torch.tanh(images @ p["w_in"] + p["b_in"])


def sharded_step(exchange: Timed, p: Parameters, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Forward and backward of this rank's shard of a batch; gradients are in ``.grad``. Returns the loss."""
    layer = ShardedExperts(exchange, p, input_layer(p, images))
    loss = loss_of(p, layer.combine(), labels)
    loss.backward(retain_graph=True)  # the input layer's graph is walked again from `sent`
    layer.backward()

    # Experts have seen the rows of all ranks, so their gradients are whole. Those of the replicated
    # parameters are sums over ranks; one message carries them all, and the loss with them.
    pieces = [p[name].grad.flatten() for name in REPLICATED] + [loss.detach().reshape(1)]
    total = exchange("all_reduce_sum", torch.cat(pieces)).split([len(piece) for piece in pieces])
    for name, gradient in zip(REPLICATED, total, strict=False):
        p[name].grad = gradient.view_as(p[name])
    return total[-1].item()


# ---------------------------------------------------------------------- training


def batches(count: int, epochs: int) -> Iterator[torch.Tensor]:
    """The indices of each whole batch, shuffled anew every epoch, the same in every process."""
    generator = torch.Generator().manual_seed(SEED + 1)
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % BATCH].split(BATCH)


def progress(steps: list[torch.Tensor], losses: list[float]) -> Iterator[torch.Tensor]:
    """The steps again, with a progress bar on a terminal and a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    terminal = console.is_terminal
    loss = TextColumn("loss {task.fields[loss]}")
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), loss, TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not terminal) as bar:
        task = bar.add_task("training", total=len(steps), loss="-")
        for number, step in enumerate(steps, 1):
            yield step
            bar.update(task, advance=1, loss=f"{losses[-1]:.4f}")
            if not terminal and number % -(-len(steps) // 5) == 0:
                print(f"  step {number:4d} of {len(steps)}   loss {losses[-1]:.4f}", flush=True)


@dataclass
class Report:
    """What one rank has to tell at the end."""

    losses: list[float]
    correct: int
    tokens_per_expert: list[int]
    communication: float
    seconds: float


def train_rank(data: dict[str, np.ndarray], epochs: int) -> Report:
    """What every rank runs, in a process of its own. The launcher's environment says who it is."""
    torch.set_num_threads(1)
    with ruda_async.sync.connect(timeout=60) as comm:
        rank, size = comm.rank, comm.world_size
        p = initial_parameters()
        local = EXPERTS // size
        for name in SHARDED:
            p[name] = p[name][rank * local : (rank + 1) * local].clone()
        images, labels = torch.from_numpy(data["train_x"]), torch.from_numpy(data["train_y"])
        steps = list(batches(len(images), epochs))
        optimizer, exchange = Sgd(p, len(steps)), Timed(comm)
        losses: list[float] = []
        start = time.perf_counter()
        for batch in progress(steps, losses) if rank == 0 else steps:
            mine = batch.chunk(size)[rank]
            losses.append(sharded_step(exchange, p, images[mine], labels[mine]))
            optimizer.step()
        seconds = time.perf_counter() - start
        communication = exchange.seconds

        # The held-out images go the same way, a shard on each rank.
        images, labels = (
            torch.from_numpy(data[key]).tensor_split(size)[rank] for key in ("test_x", "test_y")
        )
        with torch.no_grad():
            layer = ShardedExperts(exchange, p, input_layer(p, images))
            visits = torch.bincount(layer.visits, minlength=local)
            guesses = (layer.combine() @ p["w_out"] + p["b_out"]).argmax(dim=1)
        correct = comm.all_reduce_sum((guesses == labels).sum())
        return Report(losses, int(correct), visits.tolist(), communication, seconds)


def train_alone(data: dict[str, np.ndarray], epochs: int) -> list[float]:
    """The reference: the same model in this process, without any communication. Returns the losses."""
    p = initial_parameters()
    images, labels = torch.from_numpy(data["train_x"]), torch.from_numpy(data["train_y"])
    steps = list(batches(len(images), epochs))
    optimizer = Sgd(p, len(steps))
    losses = []
    for batch in steps:
        tokens = input_layer(p, images[batch])
        weights, chosen = route(p, tokens)
        combined = tokens
        for index in range(EXPERTS):
            token, choice = (chosen == index).nonzero(as_tuple=True)
            answers = expert(p, index, tokens[token])
            combined = combined.index_add(0, token, weights[token, choice, None] * answers)
        loss = loss_of(p, combined, labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------- the program


def load_data() -> dict[str, np.ndarray]:
    """Scikit-learn's 1797 digits of 8x8 pixels, centred; a fifth is held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(images))
    images, labels = images[order], labels[order].astype(np.int64)
    held_out = len(images) // 5
    images = (images - images[held_out:].mean(axis=0)) / 8
    return {
        "train_x": images[held_out:],
        "train_y": labels[held_out:],
        "test_x": images[:held_out],
        "test_y": labels[:held_out],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a sharded mixture-of-experts classifier on digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=4, choices=[1, 2, 4, 8])
    parser.add_argument("--url", default="tcp://127.0.0.1:0", help="the transport between the ranks")
    parser.add_argument("--quick", action="store_true", help="check the loss curve alone, not the accuracy")
    options = parser.parse_args()
    data = load_data()

    print(f"{options.ranks} ranks over {options.url}, {EXPERTS} experts, {options.epochs} epochs", flush=True)
    reports: list[Report] = ruda_async.spawn(
        train_rank, options.ranks, url=options.url, args=(data, options.epochs)
    )
    torch.set_num_threads(1)
    alone = np.array(train_alone(data, options.epochs))

    accuracy = reports[0].correct / len(data["test_y"])
    tokens = [count for report in reports for count in report.tokens_per_expert]
    share = sum(report.communication for report in reports) / sum(report.seconds for report in reports)
    difference = float(np.max(np.abs(np.array(reports[0].losses) - alone) / alone))
    print(f"loss                    {alone[0]:.4f} at first, {alone[-1]:.4f} at last, {len(alone)} steps")
    print(f"held-out accuracy       {accuracy:.1%} (above {ACCURACY:.0%} after a whole training)")
    print(f"tokens per expert       {' '.join(map(str, tokens))} (held-out images, {CHOSEN} experts each)")
    step = 1000 * reports[0].seconds / len(alone)
    print(f"communication           {share:.0%} of a step's {step:.1f} ms, waiting for slower ranks included")
    print(f"against one process     {difference:.1e} largest relative difference in loss (bound {BOUND:.1e})")
    failures = []
    if any(report.losses != reports[0].losses for report in reports):
        failures.append("the ranks' losses are not the same to the bit")
    if not difference <= BOUND:
        failures.append("the loss curve differs from the one-process run's")
    if not options.quick and not accuracy > ACCURACY:
        failures.append("the accuracy is too low")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
