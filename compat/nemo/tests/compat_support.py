"""Small meshes and batches that the drop-in's tests share."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan

NEMO = "longspan.compat.nemo.components."
cp_utils = importlib.import_module(NEMO + "distributed.cp_utils")
thd_utils = importlib.import_module(NEMO + "distributed.thd_utils")
glm = importlib.import_module(NEMO + "models.glm_moe_dsa.cp")
kernels = importlib.import_module(NEMO + "models.glm_moe_dsa.optimized_kernels")
dsv4 = importlib.import_module(NEMO + "models.deepseek_v4.cp")
dsv4_kernels = importlib.import_module(NEMO + "models.deepseek_v4.optimized_kernels")
gemma4 = importlib.import_module(NEMO + "models.gemma4_moe.cp_batch")


def example(name: str) -> Any:
    """A program of the drop-in's examples as a module."""
    path = pathlib.Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Mesh:
    """A mesh axis that answers what the reference's does, and nothing else."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size = size
        self._rank = rank
        self.group = f"group of {size}"

    def size(self) -> int:
        return self._size

    def get_group(self) -> Any:
        return self.group

    def get_local_rank(self) -> int:
        return self._rank


class BareMesh:
    """Only the required two answers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def get_group(self) -> Any:
        return None


class DeviceMesh(dict[str, Any]):
    """A device mesh with named axes."""

    def __init__(self, **sizes: int) -> None:
        super().__init__({name: Mesh(size) for name, size in sizes.items()})
        self.mesh_dim_names = tuple(sizes)


class RankMesh(Mesh):
    """The mesh axis of a real group, such as a thread's in run_ranks."""

    def __init__(self, group: longspan.Group) -> None:
        super().__init__(group.size(), group.rank())
        self.group = group


class RankDeviceMesh(DeviceMesh):
    """A device mesh whose axis `cp` is a real group."""

    def __init__(self, group: longspan.Group) -> None:
        super().__init__(cp=1)
        self["cp"] = RankMesh(group)


class NamelessMesh:
    """A device mesh without axis names, as torch builds it by default."""

    mesh_dim_names = None


@pytest.fixture
def group_of(monkeypatch: pytest.MonkeyPatch):
    """Pretend that a process group is up: group_of(ranks, rank)."""

    def pretend(ranks: int, rank: int) -> list[Any]:
        asked: list[Any] = []

        def get_rank(*, group: Any = None) -> int:
            asked.append(group)
            return rank

        def get_world_size(*, group: Any = None) -> int:
            asked.append(group)
            return ranks

        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", get_rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", get_world_size)
        return asked

    return pretend


@pytest.fixture
def world_of_one(tmp_path):
    """A real gloo group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def numbers(*values: int) -> Tensor:
    return torch.tensor(values)


def row_batch(rows: int = 1, length: int = 3, **more: Any) -> dict[str, Any]:
    """Ids that say where they came from: 100 * row + position + 1."""
    ids = torch.arange(rows)[:, None] * 100 + torch.arange(length) + 1
    return {"input_ids": ids, "labels": ids + 1000, **more}


def packed_batch(
    ids: list[list[int]],
    seq_lens: list[list[int]] | None,
    seq_lens_padded: list[list[int]] | None,
    **more: Any,
) -> dict[str, Any]:
    """What a packing collater gives."""
    tokens = torch.tensor(ids)
    return {
        "input_ids": tokens,
        "labels": tokens + 1000,
        "position_ids": torch.arange(tokens.shape[1]).repeat(tokens.shape[0], 1),
        "seq_lens": None if seq_lens is None else torch.tensor(seq_lens),
        "seq_lens_padded": None if seq_lens_padded is None else torch.tensor(seq_lens_padded),
        **more,
    }


def same(left: Any, right: Any) -> bool:
    """Whether two entries of a batch are the same, tensors by object."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return left is right
    return bool(left == right)


def snapshot(batch: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in batch.items()}
    return list(batch), {**dict(batch), **{f"copy of {k}": v for k, v in copies.items()}}


def unchanged(batch: dict[str, Any], before: tuple[list[str], dict[str, Any]]) -> bool:
    """Same keys in the same order, same objects, same contents."""
    keys, values = before
    if list(batch) != keys:
        return False
    for key in keys:
        copy = values[f"copy of {key}"]
        if not same(batch[key], values[key]):
            return False
        if isinstance(copy, Tensor) and not torch.equal(batch[key], copy):
            return False
    return True


def refuses(error: type[Exception], match: str, batch: Any, call: Any) -> None:
    """`call()` raises, says so, and leaves the caller's batch as it was."""
    before = snapshot(batch)
    with pytest.raises(error, match=match):
        call()
    assert unchanged(batch, before)
