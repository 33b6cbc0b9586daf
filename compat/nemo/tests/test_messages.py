"""Every refusal begins with the name of the function that was called."""

import pytest
import torch
from compat_support import (
    DeviceMesh,
    Mesh,
    cp_utils,
    dsv4,
    gemma4,
    glm,
    kernels,
    packed_batch,
    refuses,
    row_batch,
    thd_utils,
)

MESH = DeviceMesh(cp=2)

BATCH_OF_ROWS = {
    "process_input_for_thd": lambda b: thd_utils.process_input_for_thd(b),
    "split_batch_into_thd_chunks": lambda b: thd_utils.split_batch_into_thd_chunks(b, 1),
    "make_cp_batch_for_te": lambda b: cp_utils.make_cp_batch_for_te(Mesh(2), b),
    "make_cp_batch_and_ctx": lambda b: cp_utils.make_cp_batch_and_ctx(MESH, b, use_te=True),
    "make_glm_dsa_packed_cp_batch_and_ctx": lambda b: glm.make_glm_dsa_packed_cp_batch_and_ctx(
        Mesh(2), None, b
    ),
}
BAD_ROWS = {
    "overfull": packed_batch([[1, 2, 3, 4]], [[3, 9]], [[4, 9]]),
    "negative": packed_batch([[1, 2, 3, 4]], [[-3]], [[4]]),
    "slot too short": packed_batch([[1, 2, 3, 4]], [[3]], [[2]]),
    "other documents": packed_batch([[1, 2, 3, 4]], [[1, 1, 1]], [[2, 2, -1000]]),
    "no positions": {k: v for k, v in row_batch().items() if k != "position_ids"},
    "float lengths": {**packed_batch([[1]], [[1]], [[1]]), "seq_lens": torch.ones(1, 1)},
}


@pytest.mark.parametrize("name", BATCH_OF_ROWS)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_streams(group_of, name, bad):
    group_of(2, 0)
    batch = BAD_ROWS[bad]
    refuses(
        (ValueError, KeyError), rf"^['\"]?{name}: [^:]*$", batch, lambda: BATCH_OF_ROWS[name](batch)
    )


OVER_RANKS = {
    "make_dsv4_contiguous_shard_cp_batch_and_ctx": lambda b: (
        dsv4.make_dsv4_contiguous_shard_cp_batch_and_ctx(Mesh(2), None, b)
    ),
    "make_contiguous_shard_cp_batch_and_ctx": lambda b: (
        gemma4.make_contiguous_shard_cp_batch_and_ctx(Mesh(2), None, b)
    ),
    **{k: v for k, v in BATCH_OF_ROWS.items() if k.startswith("make")},
}


@pytest.mark.parametrize("name", OVER_RANKS)
@pytest.mark.parametrize("rank", [2, -1])
def test_ranks_outside_the_mesh(group_of, name, rank):
    group_of(2, rank)
    batch = packed_batch([[1, 2, 3, 4]], [[4]], [[4]])
    message = f"^{name}: this process is rank {rank} of 2 ranks; build the mesh"
    refuses(ValueError, message, batch, lambda: OVER_RANKS[name](batch))


@pytest.mark.parametrize("name", [n for n in OVER_RANKS if "contiguous" in n])
def test_padding_inside(group_of, name):
    group_of(2, 0)
    batch = row_batch()
    batch["labels"] = torch.ones(1, 3, dtype=torch.uint8)
    refuses(ValueError, f"^{name}: torch.uint8 cannot", batch, lambda: OVER_RANKS[name](batch))


def test_windows():
    def offsets(*values):
        return torch.tensor(values)

    padded = kernels._generate_padded_varlen_mask_params
    name = "^_generate_padded_varlen_mask_params: "
    for real, slots in (((0, 5), (0, 4)), ((0, 5, 3), (0, 4, 8)), ((0, 1, 2), (0, 8))):
        with pytest.raises(ValueError, match=name):
            padded(offsets(*real), offsets(*slots))
    with pytest.raises(ValueError, match=r"^_slime_generate_varlen_mask_params: "):
        kernels._slime_generate_varlen_mask_params(offsets(0, 5, 3))
    with pytest.raises(ValueError, match=r"^tilelang_indexer_topk: "):
        kernels.tilelang_indexer_topk(None, None, None, offsets(0, 5, 3), 1)


def test_what_callers_functions_raise_passes_as_it_is(monkeypatch):
    def own(*_, **__):
        raise ValueError("own: no")

    batch = row_batch(_cp_make_batch_fn=own)
    refuses(ValueError, "^own: no$", batch, lambda: cp_utils.make_cp_batch_and_ctx(MESH, batch))
    monkeypatch.setattr(cp_utils, "make_cp_batch_for_te", own)
    batch = row_batch()
    refuses(
        ValueError,
        "^own: no$",
        batch,
        lambda: cp_utils.make_cp_batch_and_ctx(MESH, batch, use_te=True),
    )
    with pytest.raises(TypeError, match=r"^make_cp_batch_and_ctx\(\) got an unexpected"):
        cp_utils.make_cp_batch_and_ctx(nothing=1)
