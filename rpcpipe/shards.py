"""Shards: torch's distributed checkpoints, written and read without a process group.

``torch.distributed.checkpoint`` plans a checkpoint in every process, puts the plans together in
one, and writes in every process; between the steps it uses collectives. Here the driver takes
the plans along by RPC. What comes of it is an ordinary checkpoint: ``dcp.load`` and
``dcp_to_torch_save`` read it anywhere.

Both would run code that somebody has put into the file. Here only tensors and plain values are
read.
"""

from __future__ import annotations

import enum
import io
import os
import pathlib
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

__all__ = ["Checkpoint", "Shard", "dump"]


def dump(what: str, value: Any) -> io.BytesIO:
    """A value as bytes, of which loading trusts nobody.

    Raises:
        TypeError: it is not made of tensors and plain values; naming ``what``.
    """
    data = io.BytesIO()
    try:
        torch.save(value, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as exc:
        raise TypeError(
            f"{what} cannot be saved: a checkpoint holds tensors, numbers, strings, and lists, "
            f"tuples and dicts of these, got {type(value).__name__}: {exc}"
        ) from exc
    return data


class Shard:
    """What one process contributes to a checkpoint.

    Args:
        path: of the checkpoint, an existing directory.
        state: nested dicts of tensors and plain values.
        whole: values by name that are not taken apart.
    """

    def __init__(
        self, path: Path, state: dict[str, Any], whole: Mapping[str, Any] | None = None
    ) -> None:
        self._writer = _Writer(path)
        self._planner = _SavePlanner()
        self._planner.set_up_planner(state, None, False)
        for name, value in (whole or {}).items():
            self._planner.state_dict[name] = value
            self._planner.mappings[name] = (name,)
        for name, value in self._planner.state_dict.items():
            if not isinstance(value, Tensor):
                self._planner.state_dict[name] = dump(name, value)

    def plan(self) -> SavePlan:
        self._writer.set_up_storage_writer(False)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def put_together(self, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """In one process: all plans as they are to be carried out."""
        planned, found = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(planned), found

    def write(self, plan: SavePlan) -> list[WriteResult]:
        """Write this process's file; returns when it is on the disk."""
        return self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()

    def finish(self, found: Metadata, results: list[list[WriteResult]]) -> None:
        """In one process, after all have written: write what says where everything is."""
        self._writer.finish(found, results)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # without the path: it is about to be renamed


class _SavePlanner(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, io.BytesIO):
            return object
        return super().transform_object(write_item, object)


class Checkpoint:
    """A checkpoint on the disk.

    Args:
        path: its directory.

    Raises:
        ValueError: it is damaged or none.
    """

    def __init__(self, path: Path) -> None:
        self._reader = _Reader(path)
        self._path = path
        try:
            self._metadata: Metadata = self._reader.read_metadata()
            self._entries = self._metadata.state_dict_metadata
            self._paths: Mapping[str, tuple[Any, ...]] = self._metadata.planner_data or {}
            self._check_files()
        except (OSError, ValueError):
            raise
        except Exception as exc:
            raise ValueError(f"{path / '.metadata'} is damaged: {exc!r}") from exc

    def _check_files(self) -> None:
        sizes: dict[str, int] = {}
        for index, info in self._metadata.storage_data.items():
            name = info.relative_path
            if os.path.basename(name) != name:
                raise ValueError(f"{self._path}: {index.fqn} is outside of the checkpoint: {name}")
            if name not in sizes:
                file = self._path / name
                sizes[name] = file.stat().st_size if file.is_file() else -1
            if sizes[name] < info.offset + info.length:
                state = "missing" if sizes[name] < 0 else "truncated"
                raise ValueError(
                    f"{self._path / name} is {state}, and with it {index.fqn}: the checkpoint is "
                    "incomplete; load another one"
                )

    def names(self) -> set[str]:
        """What there is at the top level."""
        return {str(self._path_of(key)[0]) for key in self._entries}

    def shapes(self, *prefix: str) -> dict[str, tuple[int, ...] | None]:
        """Of the tensors below, by what is left of their path; ``None`` for other values."""
        return {
            ".".join(map(str, self._path_of(key)[len(prefix) :])): (
                tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
            )
            for key, entry in self._entries.items()
            if self._path_of(key)[: len(prefix)] == prefix
        }

    def read(self, *prefix: str, only: Iterable[str] | None = None) -> Any:
        """What is below ``prefix``, with the structure it had.

        Args:
            only: of what is there, by the next part of the path.

        Raises:
            ValueError: something cannot be read; says which file and key.
        """
        chosen = None if only is None else set(only)
        k = len(prefix)
        root: dict[str, Any] = {}
        for key in self._entries:
            path = self._path_of(key)
            if path[:k] == prefix and (chosen is None or (len(path) > k and path[k] in chosen)):
                _insert(root, ("", *path[k:]), self._read_one(key))
        return root.get("", {})

    def _path_of(self, key: str) -> tuple[Any, ...]:
        return self._paths.get(key, (key,))

    def _read_one(self, key: str) -> Any:
        entry = self._entries[key]
        target: Any = entry
        if isinstance(entry, TensorStorageMetadata):
            target = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.state_dict, planner.metadata = {key: target}, self._metadata
        self._reader.set_up_storage_reader(self._metadata, False)
        plan = planner.create_local_plan()
        for item in plan.items:
            try:
                self._reader.read_data(LoadPlan([item]), planner).wait()
            except Exception as exc:
                info = self._metadata.storage_data.get(item.storage_index)
                file = self._path / info.relative_path if info else self._path
                raise ValueError(f"{key} of {file} cannot be read: {exc}") from exc
        return planner.state_dict[key]


def _insert(root: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Put a value into nested dicts and lists; a number in the path is of a list."""
    where: Any = root
    for key, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(key, int):
            where.extend([None] * (key + 1 - len(where)))
        empty: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(key, int) and where[key] is None:
            where[key] = empty
        elif not isinstance(key, int):
            where.setdefault(key, empty)
        where = where[key]


class _LoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self._get_metadata_path(), "rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise ValueError(f"{self.path}/.metadata is that of no checkpoint")
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        return found


class _MetadataUnpickler(pickle.Unpickler):
    """Takes what torch (2.13) puts into ``.metadata``, and nothing that could do harm."""

    def find_class(self, module: str, name: str) -> Any:
        if module == metadata.__name__ and name in (*metadata.__all__, "_MEM_FORMAT_ENCODING"):
            return getattr(metadata, name)
        if module == filesystem.__name__ and name == "_StorageInfo":
            return filesystem._StorageInfo
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # how an early Python 3.11 pickles one
        if module.split(".")[0] == "pathlib":  # where it was saved, on whatever system
            return pathlib.PurePosixPath
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a checkpoint's")


def _enum_member(cls: Any, name: str) -> Any:
    if isinstance(cls, type) and issubclass(cls, enum.Enum):
        return cls[name]
    raise pickle.UnpicklingError(f"it asks {cls!r} for {name}, which is not a checkpoint's")
