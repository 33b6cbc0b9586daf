"""Names, parameter names, defaults and keyword-only-ness of every function."""

import inspect
import typing

import pytest
from compat_support import cp_utils, dsv4, dsv4_kernels, gemma4, glm, kernels, thd_utils

SIGNATURES = {
    cp_utils: {
        "_build_position_ids": "(batch, device)",
        "_shard_thd_chunk_for_te": "(batch, cp_mesh, qkv_format, "
        "seq_lens_padding_value, padding_token_id)",
        "attach_context_parallel_hooks": "(model)",
        "attach_cp_sdpa_hooks": "(model, cp_mesh)",
        "create_context_parallel_ctx": "(cp_mesh, cp_buffers, cp_seq_dims, "
        "cp_no_restore_buffers, cp_rotate_method=None)",
        "gather_cp_seq": "(cp_mesh, tensors, seq_dim, orig_len)",
        "get_train_context": "(enable_loss_parallel, enable_compiled_autograd, cp_context=None)",
        "make_cp_batch_and_ctx": "(device_mesh, batch, loss_mask=None, use_te=False, "
        "padding_token_id=0, num_chunks=1, seq_lens_padding_value=-1000)",
        "make_cp_batch_for_te": "(cp_mesh, batch, qkv_format='thd', "
        "padding_token_id=0, num_chunks=1, seq_lens_padding_value=-1000)",
        "make_target_cp_ctx": "(cp_mesh, input_ids, position_ids=None)",
    },
    glm: {
        "_contiguous_cp_indices": "(total_tokens, cp_size, cp_rank, device)",
        "_slice_thd_chunk_for_cp": "(chunk, *, cp_group, cp_size, cp_rank, padding_token_id)",
        "glm_dsa_cp_all_gather": "(tensor, *, dim, cp_group)",
        "glm_dsa_cp_enabled": "(cp_group)",
        "make_glm_dsa_packed_cp_batch_and_ctx": "(cp_mesh, tp_mesh, batch, *, "
        "loss_mask=None, padding_token_id=0, num_chunks=1, "
        "seq_lens_padding_value=-1000)",
    },
    kernels: {
        "_all_cuda": "(*tensors)",
        "_generate_padded_varlen_mask_params": "(cu_seqlens, cu_seqlens_padded)",
        "is_dsa_kernel_available": "(name)",
        "should_use_tilelang": "(backend, *, available, kernel_name, tensors, require_bf16=False)",
        "tilelang_indexer_topk": "(index_q, index_k, head_weights, cu_seqlens, "
        "index_topk, query_indices=None, cu_seqlens_padded=None)",
        "tilelang_sparse_attention": "(q, kv_latent, topk_indices, w_vc, softmax_scale)",
    },
    dsv4: {
        "_lcm": "(a, b)",
        "_pad_position_ids_seq_dim_": "(position_ids, seq_dim, pad_len)",
        "_pad_tensor_seq_dim_": "(tensor, seq_dim, pad_len, value)",
        "build_dsv4_cp_causal_padding_mask": "(*, position_ids, key_len, dtype, "
        "device, cp_group, padding_mask=None, sliding_window=None)",
        "dsv4_cp_all_gather": "(tensor, *, dim, cp_group)",
        "dsv4_cp_all_gather_metadata": "(tensor, *, dim, cp_group)",
        "dsv4_cp_enabled": "(cp_group)",
        "dsv4_cp_rank": "(cp_group)",
        "dsv4_cp_size": "(cp_group)",
        "dsv4_cp_local_seq_multiple": "(model_or_config)",
        "make_dsv4_contiguous_shard_cp_batch_and_ctx": "(cp_mesh, tp_mesh, batch, *, "
        "loss_mask=None, padding_token_id=0, pad_multiple=None)",
    },
    dsv4_kernels: {
        "build_dsv4_sparse_topk_indices": "(*, batch_size, seq_len, key_len, window_size, "
        "device, attention_mask=None, compress_ratio=0, compressed_topk=None, n_pooled=0, "
        "vanilla_key_len=None, q_positions=None)",
        "dsv4_indexer_scores": "(q, pooled_kv, weights, *, compress_ratio, softmax_scale, "
        "backend, query_start=0, query_total_len=None)",
        "dsv4_indexer_topk_scores": "(q, pooled_kv, weights, topk_indices, *, compress_ratio, "
        "softmax_scale, backend)",
        "dsv4_sinkhorn_normalize": "(x, *, backend, repeat, eps)",
        "dsv4_sparse_attention": "(q, kv, sinks, topk_idxs, sm_scale, *, backend)",
        "is_dsv4_kernel_available": "(name)",
        "sinkhorn_normalize_torch": "(x, repeat, eps)",
        "sparse_attention_torch": "(q, kv, sinks, topk_idxs, sm_scale)",
        "dense_attention_topk_torch": "(q, kv, sinks, topk_idxs, sm_scale)",
        "indexer_scores_torch": "(q, pooled_kv, weights, softmax_scale, *, compress_ratio=None, "
        "query_start=0, query_total_len=None)",
        "extract_indexer_topk_scores_torch": "(logits, topk_indices)",
    },
    gemma4: {
        "_make_contiguous_shard_cp_batch": "(cp_mesh, batch, *, primary_key, "
        "seq_len, labels, position_ids, pos_seq_dim, loss_mask, padding_token_id)",
        "_pad_position_ids_seq_dim_": "(position_ids, seq_dim, pad_len)",
        "_pad_tensor_seq_dim_": "(tensor, seq_dim, pad_len, value=0)",
        "_prepare_manual_cp_batch": "(cp_mesh, tp_mesh, batch, loss_mask)",
        "_synthesize_single_document_seq_ids": "(batch, primary_key, seq_len)",
        "make_contiguous_shard_cp_batch_and_ctx": "(cp_mesh, tp_mesh, batch, *, "
        "loss_mask=None, padding_token_id=0)",
    },
    thd_utils: {
        "process_input_for_thd": "(batch, seq_lens_padding_value=-1000, padding_token_id=0)",
        "split_batch_into_thd_chunks": "(batch, num_chunks, "
        "seq_lens_padding_value=-1000, padding_token_id=0)",
    },
}

CASES = [
    pytest.param(module, name, expected, id=name)
    for module, functions in SIGNATURES.items()
    for name, expected in functions.items()
]


@pytest.mark.parametrize(("module", "name", "expected"), CASES)
def test_signature_is_the_references(module, name, expected):
    signature = inspect.signature(getattr(module, name))
    bare = signature.replace(
        parameters=[
            p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
        ],
        return_annotation=inspect.Signature.empty,
    )
    assert str(bare) == expected


def test_backend_names_are_the_references():
    for alias in (kernels.DsaIndexerBackend, kernels.DsaSparseAttentionBackend):
        assert typing.get_args(alias) == ("torch", "tilelang", "auto")
    for alias in (dsv4_kernels.Dsv4IndexerBackend, dsv4_kernels.Dsv4SinkhornBackend):
        assert typing.get_args(alias) == ("torch", "tilelang", "auto")
    backends = typing.get_args(dsv4_kernels.Dsv4SparseAttentionBackend)
    assert backends == ("torch", "sparse_torch", "tilelang", "auto")


def test_glm_and_deepseek_ask_the_replaceable_torch_distributed():
    import torch

    assert glm.dist is torch.distributed
    assert dsv4.dist is torch.distributed
