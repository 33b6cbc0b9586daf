"""What the drop-in adds to the C++ calls under it, and its windows.

    make bench
    PYTHONPATH=build/dev/python:bench python compat/nemo/bench/drop_in.py build/dev

Rows are checked and timed as in bench/run.py.
"""

from __future__ import annotations

import pathlib
import sys

import baseline
import torch
from harness import Part, Row, in_turns, main, ratio_row
from run import offsets, packed_rows

from longspan.compat.nemo import _nemo
from longspan.compat.nemo.components.distributed.cp_utils import make_cp_batch_and_ctx


def window_rows() -> list[Row]:
    batch = packed_rows(1000, 16)
    cu, cu_padded = offsets(batch["seq_lens"][0]), offsets(batch["seq_lens_padded"][0])
    right = all(
        torch.equal(a, b)
        for a, b in zip(
            _nemo.padded_windows(cu, cu_padded),
            baseline.padded_windows(cu, cu_padded),
            strict=True,
        )
    )
    t_lists, t_plain = in_turns(
        lambda: _nemo.padded_windows(cu, cu_padded),
        lambda: baseline.padded_windows(cu, cu_padded),
    )
    return [ratio_row("key windows of 1 M tokens, from offsets", right, t_lists, t_plain, 10.0)]


class Mesh:
    """As much of a device mesh as the drop-in asks for."""

    mesh_dim_names = ("cp",)

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __getitem__(self, name: str) -> Mesh:
        return self

    def size(self) -> int:
        return self.ranks

    def get_group(self) -> None:
        return None


def drop_in_rows() -> list[Row]:
    tokens, mesh = 128 * 1024 - 5, Mesh(8)
    full = {
        "input_ids": torch.arange(tokens).unsqueeze(0),
        "labels": torch.arange(tokens).unsqueeze(0),
        "position_ids": torch.arange(tokens).unsqueeze(0),
    }

    def drop_in() -> dict[str, torch.Tensor]:
        return make_cp_batch_and_ctx(mesh, dict(full))[1]

    def direct() -> list[torch.Tensor]:
        return [
            _nemo.pad_tokens(full["input_ids"], 1, 5, 0),
            _nemo.pad_tokens(full["labels"], 1, 5, -100),
            _nemo.pad_tokens(full["position_ids"], 1, 5, 0),
        ]

    made = drop_in()
    right = all(torch.equal(made[key], tensor) for key, tensor in zip(full, direct(), strict=True))
    t_drop_in, t_direct = in_turns(drop_in, direct, rounds=201)
    extra = (t_drop_in - t_direct) * 1e3
    return [
        {
            "work": "drop-in make_cp_batch_and_ctx over the C++ calls, 128 k tokens",
            "right": right,
            "ours": f"{extra:.0f} us more",
            "other": f"{t_direct:.3f} ms",
            "ratio": "",
            "bar": "< 100 us",
            "met": extra < 100,
        }
    ]


def parts(build: pathlib.Path) -> list[Part]:
    return [window_rows, drop_in_rows]


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", "The drop-in", "one thread", parts))
