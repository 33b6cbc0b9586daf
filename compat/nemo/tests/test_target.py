"""The target of EAGLE-3 over ranks, as in ../examples/eagle3_target.py."""

import copy

import pytest
import torch
from compat_support import Mesh, RankMesh, cp_utils, example
from torch import nn

from longspan import run_ranks
from longspan.compat.nemo import strict

target = example("eagle3_target")
torch.manual_seed(1)
MODEL = target.TinyLlama(layers=8, width=16).double()


def batch(tokens):
    ids = (torch.arange(2 * tokens).view(2, tokens) * 7 + 3) % 64
    pads = torch.zeros(2, tokens, dtype=torch.bool)
    pads[0, :2] = pads[1, -1:] = True
    return ids, pads


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("tokens", [12, 13, 3, 2])  # 2 and 3: ranks with one token
@pytest.mark.parametrize("padded", [False, True])
def test_hidden_states_and_logits_are_those_of_one_rank(ranks, tokens, padded):
    ids, pads = batch(tokens)
    mask = pads if padded else None
    loss_mask = torch.arange(2 * tokens).view(2, tokens) + 1
    whole = target.Target(copy.deepcopy(MODEL))(ids, loss_mask, mask)

    def work(group):
        before = ids.clone()
        out = target.Target(copy.deepcopy(MODEL), RankMesh(group))(ids, loss_mask, mask)
        assert torch.equal(ids, before)
        assert torch._C._len_torch_function_stack() == 0
        return out

    keep = ~pads if padded else torch.ones_like(pads)
    assert keep.any()
    for out in run_ranks(ranks, work):
        assert out.hidden.shape == (2, tokens, 48)
        torch.testing.assert_close(out.hidden[keep], whole.hidden[keep])
        shifted = target.shifted(keep)
        torch.testing.assert_close(out.logits[shifted], whole.logits[shifted])
        assert out.input_ids.tolist() == [[*row[1:], 0] for row in ids.tolist()]
        assert out.loss_mask.tolist() == [[*row[1:], 0] for row in loss_mask.tolist()]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Gemma4ForCausalLM"])
def test_a_lone_token_of_transformers_is_one_of_many(family, ranks):
    """As many tokens as ranks: transformers calls a single query not causal."""
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, family)
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    if family.startswith("Gemma4"):
        kinds = ["sliding_attention", "full_attention"] * 2  # the window is longer than the row
        heads |= {"layer_types": kinds, "num_kv_shared_layers": 2, "global_head_dim": 8}
        heads |= {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64}
    whole = model(model.config_class(**sizes, **heads)).double().eval()
    ids = (torch.arange(2 * ranks).view(2, ranks) * 7 + 3) % 64

    def states(of, ids, **keywords):
        with torch.no_grad():
            out = of(ids, use_cache=False, output_hidden_states=True, **keywords)
        return [*out.hidden_states, out.logits]

    def work(group):
        mesh, mine = RankMesh(group), copy.deepcopy(whole)
        cp_utils.attach_context_parallel_hooks(mine)
        context, local, positions, length = cp_utils.make_target_cp_ctx(mesh, ids)
        with context:
            mine_states = states(mine, local, position_ids=positions)
            assert mine_states[-1].shape[1] == 1
            return cp_utils.gather_cp_seq(mesh, mine_states, 1, length)

    for gathered in run_ranks(ranks, work):
        for ours, true in zip(gathered, states(whole, ids), strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-6, atol=1e-6)


def test_positions_are_the_callers():
    ids, _ = batch(6)
    positions = torch.arange(6)[None] + 100
    whole = MODEL(ids, positions)

    def work(group):
        mesh = RankMesh(group)
        context, local, moved, length = cp_utils.make_target_cp_ctx(mesh, ids, positions)
        with context, torch.no_grad():
            assert (
                moved.tolist()
                == [[x + 100 for x in range(3 * group.rank(), 3 * group.rank() + 3)]] * 2
            )
            logits = copy.deepcopy(MODEL)(local, moved)
            out = cp_utils.gather_cp_seq(mesh, [logits, local], 1, length)
        assert local.shape == moved.shape == (2, 3)  # nothing is restored
        return out

    for logits, gathered in run_ranks(2, work):
        torch.testing.assert_close(logits, whole)
        assert torch.equal(gathered, ids)


def test_full_attention_sees_the_pads_of_cp_in_strict_only():
    values = torch.tensor([1.0, 2.0, 3.0, 99.0]).view(1, 1, 4, 1)
    zeros = torch.zeros_like(values)

    def work(group):
        def mean():
            context, *_ = cp_utils.make_target_cp_ctx(RankMesh(group), torch.ones(1, 3).long())
            mine = slice(2 * group.rank(), 2 * group.rank() + 2)
            q, v = zeros[:, :, mine], values[:, :, mine]
            with context:
                return nn.functional.scaled_dot_product_attention(q, q, v)[0, 0, 0].item()

        with strict():
            plain = mean()
        return mean(), plain

    assert run_ranks(2, work) == [(2.0, 26.25)] * 2


@pytest.mark.parametrize("ids", [[1, 2], [1, 1, 2], [1, 2, 8], [-1, 1, 2]])
def test_layers_are_three_different_ones(ids):
    with pytest.raises(ValueError, match="name three different ones"):
        target.Target(MODEL, None, ids)


def test_default_layers():
    assert target.Target(MODEL).layer_ids == [1, 3, 4]
    with pytest.raises(ValueError, match=r"layers \[1, 1, 0\] of a model with 4"):
        target.Target(target.TinyLlama(layers=4))


def test_models_must_fit():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = MODEL.layers

        def forward(self, input_ids):
            raise AssertionError

    with pytest.raises(ValueError, match="takes no position_ids"):
        target.Target(Other(), Mesh(2))
    bare = Other()
    bare.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(8))
    with pytest.raises(ValueError, match="self_attn"):
        target.Target(bare, Mesh(2))
    target.Target(bare, Mesh(1))


def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["eagle3_target.py", "--ranks", "3", "--tokens", "11"])
    assert target.main() == 0
    assert "11 tokens over 3 ranks give what one rank gives" in capsys.readouterr().out


@pytest.mark.parametrize(("ranks", "tokens"), [(3, 23), (2, 14)])
def test_the_example_takes_a_glm_target(ranks, tokens, monkeypatch, capsys):
    """Rows are longer than the keys that a query selects."""
    pytest.importorskip("transformers")
    options = ["--target", "glm_moe_dsa", "--ranks", str(ranks), "--tokens", str(tokens)]
    monkeypatch.setattr("sys.argv", ["eagle3_target.py", *options])
    assert target.main() == 0
    told = capsys.readouterr().out
    assert f"{tokens} tokens over {ranks} ranks give what one rank gives" in told
    assert told.count(f"hidden [2, {tokens}, 192]") == ranks


def test_a_parallelized_target_is_checked_too(monkeypatch):
    pytest.importorskip("transformers")
    model = target.family_model("glm_moe_dsa")
    assert model.config.num_hidden_layers == 8 and model.config.index_topk < 14
    assert target.ParallelizedTarget(model).layer_ids == [1, 3, 4]
    with pytest.raises(ValueError, match="name three different ones"):
        target.ParallelizedTarget(model, None, [1, 1, 2])
    with pytest.raises(SystemExit, match="eagle3_target: 'glm_moe' is neither"):
        target.family_model("glm_moe")
