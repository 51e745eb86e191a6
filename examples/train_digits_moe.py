"""Train a mixture-of-experts classifier on handwritten digits, with autograd and `GradientSync`.

Four processes, eight experts, two on each rank. What ``examples/train_digits.py`` writes out by hand is done
here by the library: `moe.moe_layer` exchanges tokens and, in backward, their gradients; `GradientSync`
averages the gradients of the replicated layers while backward still runs. Experts have seen the tokens of all
ranks, so theirs are whole; ``groups=[(experts, None)]`` says so.

    python examples/train_digits_moe.py [--epochs 15] [--ranks 4] [--url tcp://127.0.0.1:0] [--save PATH]
    ruda-async run -n 4 examples/train_digits_moe.py [--epochs 15] [--save PATH]

It prints the accuracy on held-out images, which has to be above 95 %, how many tokens each expert got,
and the share of a step that is communication. ``--save PATH`` keeps the model; ``digits_moe`` says in which
form.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from digits_moe import CLASSES, DigitsMoE, Sizes, prepare, save
from digits_moe.stopwatch import Stopwatch
from torch.nn import functional

import ruda_async
from ruda_async import moe, training

BATCH, LEARNING_RATE = 128, 0.01
SEED = 2024
#: The least share of held-out images that must be classified right.
ACCURACY = 0.95


@dataclass
class Report:
    """What one rank has to tell at the end.

    Attributes:
        losses: of the whole batch, at each step.
        accuracy: on the held-out images of all ranks.
        tokens_per_expert: of the held-out images, of all experts.
        exchanges: seconds in dispatch, exchanges and combine.
        waiting: seconds in which backward was over and gradients were not yet averaged.
        overlapped: seconds in which gradients were on their way while backward still ran.
        seconds: of the training.
    """

    losses: list[float]
    accuracy: float
    tokens_per_expert: list[int]
    exchanges: float
    waiting: float
    overlapped: float
    seconds: float


def load_data() -> dict[str, np.ndarray]:
    """Scikit-learn's 1797 digits of 8x8 pixels; a fifth is held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(images))
    images, labels = images[order], labels[order].astype(np.int64)
    held_out = len(images) // 5
    return {
        "train_x": images[held_out:],
        "train_y": labels[held_out:],
        "test_x": images[:held_out],
        "test_y": labels[:held_out],
    }


def scores_of(
    model: DigitsMoE, comm: Any, layout: moe.ExpertLayout, images: torch.Tensor, watch: Stopwatch
) -> torch.Tensor:
    """`DigitsMoE.forward` with a stopwatch."""
    tokens = model.tokens(images)
    experts = watch.experts(model.experts_fn())

    def layer(inputs: torch.Tensor) -> torch.Tensor:
        return moe.moe_layer(comm, inputs, model.router(tokens), experts, layout, model.sizes.chosen)

    scores: torch.Tensor = model.output(tokens + watch.layer(tokens, layer))
    return scores


def train_rank(data: dict[str, np.ndarray], epochs: int, path: str | None = None) -> Report:
    """What every rank runs. The launcher's environment says who it is."""
    torch.set_num_threads(1)
    with ruda_async.sync.connect(timeout=120) as comm:
        rank, size, sizes = comm.rank, comm.world_size, Sizes()
        layout = moe.ExpertLayout.even(sizes.experts, size)
        torch.manual_seed(SEED + 1 + rank)  # other experts on each rank; the rest is rank 0's
        model = DigitsMoE(sizes, layout.local(rank))
        mean = data["train_x"].mean(axis=0).astype(np.float32)
        model.mean.copy_(torch.from_numpy(mean))
        # Small buckets, since the model is: the last layers' gradients leave before the experts' are there.
        gradients = training.GradientSync(
            model, comm, groups=[(model.experts.parameters(), None)], bucket_bytes=4096
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

        images, labels = prepare(data["train_x"], mean), torch.from_numpy(data["train_y"])
        generator = torch.Generator().manual_seed(SEED)  # the same batches everywhere
        watch = Stopwatch()
        losses: list[float] = []
        steps = epochs * (len(images) // BATCH)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
        start = time.perf_counter()
        for _ in range(epochs):
            order = torch.randperm(len(images), generator=generator)
            for batch in order[: len(order) - len(order) % BATCH].split(BATCH):
                mine = batch.chunk(size)[rank]
                optimizer.zero_grad()
                loss = functional.cross_entropy(
                    scores_of(model, comm, layout, images[mine], watch), labels[mine]
                )
                gradients.backward(loss)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
        seconds = time.perf_counter() - start
        exchanges, stats = watch.seconds, gradients.stats()

        # The held-out images go the same way, a shard on each rank.
        images = prepare(data["test_x"], mean).tensor_split(size)[rank]
        labels = torch.from_numpy(data["test_y"]).tensor_split(size)[rank]
        with torch.no_grad():
            guesses = model(images, comm, layout).argmax(dim=1)
            chosen = moe.route(model.router(model.tokens(images)), sizes.chosen).experts
        visits = comm.all_reduce_sum(torch.bincount(chosen.flatten(), minlength=sizes.experts))
        correct = int(comm.all_reduce_sum((guesses == labels).sum()))
        whole = comm.all_reduce(torch.tensor(losses, dtype=torch.float64), "mean")
        if path is not None:
            save(path, model, comm)
        accuracy = correct / len(data["test_y"])
        return Report(
            whole.tolist(), accuracy, visits.tolist(), exchanges, stats.waiting, stats.overlapped, seconds
        )


def show(report: Report, quick: bool) -> int:
    """Print rank 0's report; the exit code."""
    sizes = Sizes()
    communication = report.exchanges + report.waiting
    step = 1000 * report.seconds / len(report.losses)
    print(f"loss                    {report.losses[0]:.4f} at first, {report.losses[-1]:.4f} at last")
    print(f"held-out accuracy       {report.accuracy:.1%} (above {ACCURACY:.0%} after a whole training)")
    visits = " ".join(map(str, report.tokens_per_expert))
    print(f"tokens per expert       {visits} (held-out images, {sizes.chosen} experts each)")
    print(
        f"communication           {communication / report.seconds:.0%} of a step's {step:.1f} ms, waiting "
        f"for slower ranks included: {report.exchanges:.2f} s for tokens, {report.waiting:.2f} s for "
        "gradients"
    )
    print(f"hidden behind backward  {report.overlapped:.2f} s of gradients' communication")
    if not quick and not report.accuracy > ACCURACY:
        print("FAILED: the accuracy is too low")
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a mixture-of-experts classifier by GradientSync.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=4, choices=[1, 2, 4, 8])
    parser.add_argument("--url", default="tcp://127.0.0.1:0", help="the transport between the ranks")
    parser.add_argument("--save", metavar="PATH", help="where to keep the trained model (.npz)")
    parser.add_argument("--quick", action="store_true", help="do not judge the accuracy")
    options = parser.parse_args()
    data = load_data()
    if os.environ.get("RUDA_RANK"):  # a launcher started the ranks, and this is one of them
        report = train_rank(data, options.epochs, options.save)
        return show(report, options.quick) if os.environ["RUDA_RANK"] == "0" else 0
    print(f"{options.ranks} ranks over {options.url}, {options.epochs} epochs, {CLASSES} classes", flush=True)
    reports: list[Report] = ruda_async.spawn(
        train_rank, options.ranks, url=options.url, args=(data, options.epochs, options.save)
    )
    return show(reports[0], options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
