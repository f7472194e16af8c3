"""Weights: a model's parameters and buffers in safetensors files, without anything else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rpcpipe.folder import sync_directory

__all__ = ["SUFFIX", "read", "save", "shapes"]

SUFFIX = ".safetensors"


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as exc:
        raise ImportError(
            f"{SUFFIX} files take the package of that name: pip install rpcpipe[safetensors]"
        ) from exc
    return safetensors


def save(state: Mapping[str, Any], path: Path) -> Path:
    """Write one file, which is whole or not there.

    Raises:
        TypeError: something is no tensor.
    """
    library = _safetensors()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"a {SUFFIX} file holds tensors, and {name} is {type(value).__name__}: save to a "
                "directory instead"
            )
    # Copies: tensors that share memory are refused, and a plain module has each name of a tie.
    own = {name: value.detach().clone().contiguous() for name, value in state.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    library.torch.save_file(own, draft, metadata={"format": "pt"})
    with open(draft, "rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)
    sync_directory(path.parent)
    return path


def shapes(path: Path) -> dict[str, tuple[int, ...] | None]:
    """Of all tensors of a file.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is damaged.
    """
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in names}


def _opened(path: Path) -> Any:
    library = _safetensors()
    try:
        return library.safe_open(path, framework="pt")
    except library.SafetensorError as exc:
        raise ValueError(f"{path} is damaged or no {SUFFIX} file: {exc}") from exc
