"""A mixture-of-experts classifier of handwritten digits: the model, and how it is saved.

The model is trained by ``examples/train_digits_moe.py``, its experts sharded over ranks, and can be served
with any other number of ranks: a saved model is whole, and `load` makes one with the experts it is asked for.

**The file** is numpy's ``.npz`` without any pickled object (``numpy.load(path, allow_pickle=False)``):

=========================  ==========================  ==================================================
entry                      array                       meaning
=========================  ==========================  ==================================================
``format``                 string, scalar              ``"digits_moe/1"``
``sizes``                  int64 ``[4]``               experts, experts per token, width, hidden width
``mean``                   float32 ``[64]``            what is taken from pixels (0 … 16) before division by 8
``input.weight``           float32 ``[width, 64]``     the input layer, followed by tanh
``input.bias``             float32 ``[width]``
``router.weight``          float32 ``[experts, width]``  scores; softmax, the best ones' weights normalised
``experts.N.up.weight``    float32 ``[hidden, width]``  expert ``N``, of all ``0 … experts-1``: up, relu, down
``experts.N.down.weight``  float32 ``[width, hidden]``
``output.weight``          float32 ``[10, width]``     the output layer
``output.bias``            float32 ``[10]``
=========================  ==========================  ==================================================

With ``x`` the pixels, the scores of the ten classes are ``output(t + sum of w_n * expert_n(t))`` where
``t = tanh(input((x - mean) / 8))``. Matrices are as `torch.nn.Linear` has them.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ruda_async import moe

__all__ = ["CLASSES", "PIXELS", "DigitsMoE", "Expert", "Sizes", "load", "prepare", "save"]

PIXELS, CLASSES = 64, 10
FORMAT = "digits_moe/1"


class Sizes(NamedTuple):
    """The model's sizes."""

    experts: int = 8
    chosen: int = 2
    width: int = 64
    hidden: int = 64


class Expert(nn.Module):
    """A two-layer perceptron: ``[rows, width]`` to the same shape."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(rows)))
        return result


class DigitsMoE(nn.Module):
    """The classifier, with those experts that one rank owns.

    Attributes:
        experts: by their number in the whole model, as text.
    """

    def __init__(self, sizes: Sizes, owned: range) -> None:
        super().__init__()
        self.sizes = sizes
        self.input = nn.Linear(PIXELS, sizes.width)
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.output = nn.Linear(sizes.width, CLASSES)
        self.experts = nn.ModuleDict({str(number): Expert(sizes) for number in owned})
        self.register_buffer("mean", torch.zeros(PIXELS))

    def tokens(self, images: Tensor) -> Tensor:
        """Prepared images ``[n, 64]`` to tokens ``[n, width]``."""
        result: Tensor = torch.tanh(self.input(images))
        return result

    def experts_fn(self) -> Any:
        """What `moe.moe_layer` calls."""
        return moe.per_expert(list(self.experts.values()))

    def forward(self, images: Tensor, comm: Any, layout: moe.ExpertLayout) -> Tensor:
        """Prepared images ``[n, 64]`` to scores ``[n, 10]``; collective, over a blocking communicator."""
        tokens = self.tokens(images)
        mixed = moe.moe_layer(comm, tokens, self.router(tokens), self.experts_fn(), layout, self.sizes.chosen)
        scores: Tensor = self.output(tokens + mixed)
        return scores


def prepare(pixels: np.ndarray, mean: np.ndarray) -> Tensor:
    """Pixels from 0 to 16 ``[n, 64]`` to the model's input."""
    return torch.from_numpy(((pixels - mean) / 8).astype(np.float32))


def save(path: str | Path, model: DigitsMoE, comm: Any) -> None:
    """Write the whole model to `path` on rank 0; collective, since the other ranks' experts are sent there.

    The experts have to be laid out over the ranks of `comm` in order and evenly.
    """
    arrays: dict[str, np.ndarray] = {
        "format": np.array(FORMAT),
        "sizes": np.array(model.sizes, dtype=np.int64),
    }
    for name, value in model.state_dict().items():
        if not name.startswith("experts."):
            arrays[name] = value.numpy()
    for layer in ("up", "down"):
        own = torch.stack([getattr(expert, layer).weight.detach() for expert in model.experts.values()])
        whole = comm.gather(own, 0)
        if whole is not None:
            for number, value in enumerate(whole):
                arrays[f"experts.{number}.{layer}.weight"] = value.numpy()
    if comm.rank == 0:
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)


def load(path: str | Path | IO[bytes], owned: range | None = None) -> DigitsMoE:
    """The model of a file, with the experts `owned`, or all of them. Other experts are not looked at.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file, is damaged, or has not these experts.
    """
    if isinstance(path, str | Path):
        with open(path, "rb") as opened:
            return load(opened, owned)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"it is not of the format {FORMAT!r}, or cut short")
    path.seek(0)
    try:
        with np.load(path, allow_pickle=False) as file:
            if "format" not in file or str(file["format"]) != FORMAT:
                raise ValueError(f"it is not of the format {FORMAT!r}")
            sizes = _sizes(file)
            owned = range(sizes.experts) if owned is None else owned
            if owned and not (owned[0] >= 0 and owned[-1] < sizes.experts):
                raise ValueError(f"it has the experts 0 to {sizes.experts - 1}, not {list(owned)}")
            arrays = {name: _read(file, name, shape) for name, shape in _shapes(sizes, owned).items()}
    except (EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"it is damaged ({error})") from None
    model = DigitsMoE(sizes, owned)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return model


def _sizes(file: Any) -> Sizes:
    told = file["sizes"] if "sizes" in file else np.zeros(0)
    if told.shape != (4,) or told.dtype.kind != "i" or told.min() < 1 or told[1] > told[0]:
        raise ValueError(
            f"its sizes are {told.tolist()} instead of experts, chosen (of them), width and hidden"
        )
    return Sizes(*told.tolist())


def _shapes(sizes: Sizes, owned: range) -> dict[str, tuple[int, ...]]:
    """The entries of a model with the experts `owned`."""
    shapes: dict[str, tuple[int, ...]] = {
        "mean": (PIXELS,),
        "input.weight": (sizes.width, PIXELS),
        "input.bias": (sizes.width,),
        "router.weight": (sizes.experts, sizes.width),
        "output.weight": (CLASSES, sizes.width),
        "output.bias": (CLASSES,),
    }
    for number in owned:
        shapes[f"experts.{number}.up.weight"] = (sizes.hidden, sizes.width)
        shapes[f"experts.{number}.down.weight"] = (sizes.width, sizes.hidden)
    return shapes


def _read(file: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in file:
        raise ValueError(f"it has no {name}")
    array: np.ndarray = file[name]
    if array.shape != shape or array.dtype != np.float32:
        raise ValueError(f"its {name} is {array.dtype} {list(array.shape)} instead of float32 {list(shape)}")
    if not np.isfinite(array).all():
        raise ValueError(f"its {name} is not finite everywhere; the training diverged")
    return array
