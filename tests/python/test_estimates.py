"""What a step is said to need is what it needs, and balance is that of all ranks."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import longspan
from longspan import Group, _balance, _estimating, _families, run_ranks

pytest.importorskip("transformers")

from allocations import peak_of, peak_of_step
from oracle.tiny_decoders import WIDER_GLM, WIDER_MAMBA, WIDER_V4, decoder, packed
from oracle.whole_models import parts_of
from processes import silent_two_ranks
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

BENCH = pathlib.Path(__file__).parents[2] / "bench"
PROGRAM = os.environ.get("LONGSPAN_CLI", "")
LENGTHS = [700, 200, 124]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def wider(family: str, dtype: torch.dtype, **sizes: Any) -> Any:
    """Large enough for activations to count."""
    return decoder(family, dtype, **(SIZES | sizes)).train()


CASES = {
    "llama": ("llama", torch.float32, False, {}),
    "llama, large words": ("llama", torch.float32, False, {"vocab_size": 8000}),
    "llama, checkpointing": ("llama", torch.float32, True, {}),
    "llama, bfloat16": ("llama", torch.bfloat16, False, {}),
    "gemma3": ("gemma3", torch.float32, False, {"vocab_size": 2000, "num_hidden_layers": 2}),
    "llama, tiles": ("llama", torch.float32, True, {"vocab_size": 8000}),
    "llama, bfloat16, tiles": ("llama", torch.bfloat16, True, {"vocab_size": 8000}),
    "mixtral, experts in turn": ("mixtral", torch.float32, False, {}),
    "mixtral, experts at once": (
        "mixtral",
        torch.float32,
        False,
        {"experts_implementation": "grouped_mm"},
    ),
    "mamba2": ("mamba2", torch.float32, False, WIDER_MAMBA),
    "qwen3_next": ("qwen3_next", torch.float32, True, {"num_hidden_layers": 3}),
    "glm_moe_dsa": ("glm_moe_dsa", torch.float32, False, WIDER_GLM),
    "deepseek_v4": ("deepseek_v4", torch.float32, True, WIDER_V4 | {"num_hidden_layers": 4}),
}


#: What `parallelize` is told, where it is told something.
TOLD = {
    "llama, tiles": {"loss_tile": 128, "mlp_tile": 128},
    "llama, bfloat16, tiles": {"loss_tile": 128, "mlp_tile": 128},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_that_of_the_allocator(case: str) -> None:
    family, dtype, checkpointing, sizes = CASES[case]
    model = longspan.parallelize(wider(family, dtype, **sizes), **TOLD.get(case, {}))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    said = longspan.explain(model, LENGTHS, device="cpu", optimizer="sgd")
    assert said.memory is not None, said.no_memory
    ids = torch.zeros(1, sum(LENGTHS), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "seq_lens": torch.tensor([LENGTHS])}
    real = peak_of_step(model, longspan.shard(batch, model=model))
    assert said.memory.peak - said.memory.weights == pytest.approx(real, rel=0.1)


def kept_peaks() -> dict[tuple[int, str], float]:
    """GiB over the weights that bench/long_step.py measured on one H200, by tokens and way."""
    page = (BENCH / "results" / "long-step_h200_2026-11-19.md").read_text()
    rows = re.findall(r"^\| (\d+) tokens, (.+?) \| equal \| ([\d.]+) GiB", page, re.MULTILINE)
    return {(int(tokens), way): float(peak) for tokens, way, peak in rows}


@pytest.mark.parametrize(("tokens", "way"), kept_peaks())
def test_the_peak_is_that_of_an_h200(
    tokens: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kept in bench/results, to 3 %, as docs/memory.md says."""
    monkeypatch.syspath_prepend(BENCH)
    bench = importlib.import_module("long_step")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**bench.CONFIG)).bfloat16().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    said = longspan.explain(model, tokens, device="h200", optimizer="sgd", **bench.WAYS[way])
    assert said.memory is not None, said.no_memory
    peak = (said.memory.peak - said.memory.weights) / 2**30
    assert peak == pytest.approx(kept_peaks()[tokens, way], rel=0.03)


def test_seven_peaks_of_an_h200_are_kept() -> None:
    """That of 131072 tokens with whole logits did not fit."""
    assert len(kept_peaks()) == 7


@pytest.mark.slow
def test_the_peak_over_ranks_is_that_of_the_allocator() -> None:
    """A rank that waits for its peer holds less at once than one that does not, so the
    estimate is held to the rank with the highest peak, and the other may stay below."""
    of_ranks = [
        [line.split() for line in text.splitlines() if line.startswith("memory: ")]
        for text in silent_two_ranks()
    ]
    assert [len(found) for found in of_ranks] == [10, 10]
    for first, second in zip(*of_ranks, strict=True):
        assert first[:3] == second[:3]
        ratios = sorted(float(one[3]) for one in (first, second))
        assert 0.9 <= ratios[0] <= 1.1 and ratios[1] <= 1.3, (first, second)


def test_a_decoder_without_a_head_has_no_loss() -> None:
    model = longspan.parallelize(wider("llama", torch.float32).model)
    said = longspan.explain(model, LENGTHS, device="cpu", optimizer="sgd")
    assert said.memory is not None, said.no_memory
    assert said.memory.loss == 0
    ids = torch.zeros(1, sum(LENGTHS), dtype=torch.int64)
    local = longspan.shard({"input_ids": ids, "seq_lens": torch.tensor([LENGTHS])}, model=model)

    def step() -> None:
        model(**local).last_hidden_state.sum().backward()
        model.zero_grad()

    step()
    assert said.memory.peak - said.memory.weights == pytest.approx(peak_of(step), rel=0.1)


def test_a_head_that_learns_alone_has_a_loss() -> None:
    model = wider("llama", torch.float32, vocab_size=5000).requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    said = longspan.explain(model, 1024, device="cpu", loss_tile=None)
    assert said.memory is not None, said.no_memory
    assert said.memory.gradients == 5000 * 256 * 4
    assert 2 <= said.memory.loss / (1024 * 5000 * 4) <= 4.5


def test_what_learns_nothing_has_no_step() -> None:
    model = wider("llama", torch.float32).requires_grad_(False)
    said = longspan.explain(model, LENGTHS, device="cpu")
    assert said.memory is None and said.fits is None
    assert "memory: not known, since nothing in LlamaForCausalLM learns: no param" in str(said)
    model.model.norm.weight.requires_grad_(True)
    assert longspan.explain(model, LENGTHS, device="cpu").memory is not None


def test_parts_are_what_they_say() -> None:
    model = wider("llama", torch.float32, vocab_size=5000)
    said = longspan.explain(model, 1024, ranks=4, device="h200", loss_tile=None)
    memory = said.memory
    assert memory is not None, said.no_memory
    weights = sum(p.numel() for p in model.parameters()) * 4
    assert memory.gradients == weights
    assert memory.optimizer == 2 * weights
    assert 0 <= memory.weights - weights <= 1024  # and rotary frequencies
    logits = said.tokens * 5000 * 4
    assert 2 * logits <= memory.loss <= 4.5 * logits
    block = said.tokens * 2 * 4 * 32 * 4  # keys and values of four heads
    assert memory.attention >= 2 * block
    assert memory.peak > memory.weights + memory.optimizer + memory.kept
    assert said.fits is True
    assert str(said).splitlines()[-1] == "fits in 141 GB: yes, 0"
    told = json.loads(json.dumps(said.to_json()))
    assert told["memory"]["peak"] == memory.peak and told["fits"] is True


def test_more_ranks_and_checkpoints_need_less() -> None:
    model = wider("llama", torch.float32)

    def kept(ranks: int) -> int:
        said = longspan.explain(model, 4096, ranks=ranks, device="cpu")
        assert said.memory is not None, said.no_memory
        return said.memory.kept

    one, four = kept(1), kept(4)
    assert four == pytest.approx(one / 4, rel=0.05)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert kept(4) < four / 3


def test_tiles_and_the_host_need_less() -> None:
    model = wider("llama", torch.bfloat16, vocab_size=8000, num_hidden_layers=8)
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def memory(**options: Any) -> Any:
        said = longspan.explain(model, 20480, ranks=2, device="cpu", **options)
        assert said.memory is not None, said.no_memory
        return said.memory

    whole = memory(loss_tile=None)
    tiled = memory()  # of more than 256 MiB of logits, as parallelize would
    assert tiled.loss < whole.loss / 4
    assert memory(mlp_tile=512).peak < tiled.peak < whole.peak
    away = memory(offload="hidden")
    assert away.kept < tiled.kept / 3 and away.peak < tiled.peak


def test_shards_spread_what_stays() -> None:
    model = wider("llama", torch.float32)
    whole = longspan.explain(model, 512, ranks=4, device="cpu").memory
    spread = longspan.explain(model, 512, ranks=4, device="cpu", shards=4).memory
    assert whole is not None and spread is not None
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(spread, part) == getattr(whole, part) // 4
    assert spread.kept == whole.kept
    assert spread.peak < whole.peak


def test_no_group_no_weights_no_batch() -> None:
    real = decoder("gemma3", torch.float32)
    batch = packed(LENGTHS).batch

    def body(group: Group) -> Any:
        return longspan.explain(real, batch, group)

    ranks = run_ranks(3, body)
    nowhere = decoder("gemma3", torch.float32).to("meta")
    for rank, there in enumerate(ranks):
        here = longspan.explain(nowhere, LENGTHS, ranks=3, rank=rank)
        assert (here.rank, here.ranks, here.tokens) == (rank, 3, there.tokens)
        for mine, theirs in zip(here.layers, there.layers, strict=True):
            assert (mine.pairs, mine.sent_forward) == (theirs.pairs, theirs.sent_forward)
        assert here.balance == there.balance


def test_balance_is_that_of_all_ranks() -> None:
    model = decoder("mistral", torch.float32)
    said = longspan.explain(model, LENGTHS, ranks=3)
    assert said.balance is not None
    work = [
        sum(cost.pairs * cost.layer.heads for cost in of_rank.layers)
        for of_rank in (longspan.explain(model, LENGTHS, ranks=3, rank=rank) for rank in range(3))
    ]
    assert list(said.balance.work) == work
    assert set(said.balance.others) | {said.balance.layout} == {
        layout.name for layout in longspan.values.named_layouts()
    }
    assert longspan.explain(model, LENGTHS).balance is None


@pytest.mark.parametrize(
    ("strategy", "ranks", "heads", "key_heads", "shares"),
    [
        ("head_parallel", 4, 10, 5, (2, 3, 2, 3)),
        ("head_parallel", 4, 2, 1, (0, 1, 0, 1)),
        ("head_parallel", 2, 4, 2, (2, 2)),
        (longspan.Strategy("head_parallel_ring", head_ranks=2), 4, 3, 1, (1, 2, 1, 2)),
    ],
)
def test_balance_of_heads_is_that_of_the_plan(
    strategy: Any, ranks: int, heads: int, key_heads: int, shares: tuple[int, ...]
) -> None:
    """Members of a team have all its queries, for their heads."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": 8}
    model = decoder("llama", torch.float32, hidden_size=8 * heads, **sizes)

    def explained(rank: int) -> Any:
        return longspan.explain(model, LENGTHS, ranks=ranks, rank=rank, strategy=strategy)

    balance = explained(0).balance
    every = (explained(rank).layers for rank in range(ranks))
    pairs = [sum(cost.pairs for cost in layers) for layers in every]
    assert list(balance.work) == [p * h for p, h in zip(pairs, shares, strict=True)]
    assert bool(balance.uneven) == (min(shares) != max(shares))
    if balance.uneven:
        assert f"; {heads} heads over teams of" in str(balance)
    else:
        assert balance.heaviest == 1.0


@pytest.mark.skipif(not PROGRAM, reason="LONGSPAN_CLI names no program")
@pytest.mark.parametrize("heads", [1, 3, 10, 12, 31])
def test_heads_are_dealt_as_the_program_says(heads: int) -> None:
    options = ["--tokens", "16", "--ranks", "4", "--strategy", "head-parallel", "--format", "json"]
    command = [PROGRAM, "plan", *options, "--heads", str(heads), "--key-heads", "1"]
    told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    ranks = told["panels"][0]["ranks"]
    assert tuple(rank["heads"] for rank in ranks) == _balance._shares(heads, 4)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "gemma2", "gemma4", "deepseek_v3", "deepseek_v4"),
        *("glm_moe_dsa", "lfm2_moe", "kimi_linear"),
    ],
)
def test_other_families_are_known(family: str) -> None:
    model = decoder(family, torch.float32)
    before = model.config.to_dict(), getattr(model.config, "_experts_implementation", None)
    said = longspan.explain(model, [40, 24], ranks=2, device="h100")
    assert said.memory is not None, said.no_memory
    assert said.memory.peak > said.memory.weights
    after = model.config.to_dict(), getattr(model.config, "_experts_implementation", None)
    assert before == after


def test_what_is_not_known_says_why() -> None:
    """Experts of DBRX look for their tokens one after the other, and have no other way."""
    dbrx = next(one for one in _families.families() if one.kind == "dbrx")
    said = longspan.explain(_families.made(dbrx), [40, 24], ranks=2, device="h100")
    assert said.memory is None and said.fits is None
    assert "does not run without values (" in said.no_memory
    assert "memory: not known, since" in str(said)


def test_a_parallelized_model_stays_as_it_is() -> None:
    model = longspan.parallelize(wider("llama", torch.float32))
    before = parts_of(model)
    said = longspan.explain(model, [64, 64], device="cpu")
    assert said.memory is not None, said.no_memory
    assert parts_of(model) == before
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_what_lengths_may_be() -> None:
    model = decoder("llama", torch.float32)
    with pytest.raises(ValueError, match="explain: `batch` is 0; expected 1 to 268435456"):
        longspan.explain(model, [3, 0])
    with pytest.raises(ValueError, match="explain: `batch` has 0 tokens; expected documents"):
        longspan.explain(model, [])
    with pytest.raises(TypeError, match="explain: `batch` holds a str; expected whole numbers"):
        longspan.explain(model, ["a"])
    as_list = str(longspan.explain(model, [40, 24]))
    assert str(longspan.explain(model, torch.tensor([40, 24]))) == as_list
    assert str(longspan.explain(model, torch.tensor(64))) == str(longspan.explain(model, 64))
    for none in (torch.tensor([[40, 24]]), torch.tensor([4.0]), torch.eye(2).long().to_sparse()):
        with pytest.raises(TypeError, match=r"explain: `batch` is an? .* tensor of . axes; expect"):
            longspan.explain(model, none)
    with pytest.raises(ValueError, match="explain: `batch` is 0; expected 1 to 268435456"):
        longspan.explain(model, torch.tensor([3, 0]))
    local = longspan.shard(packed([16, 8]).batch, rank=0, ranks=2)
    with pytest.raises(ValueError, match="explain: the batch was cut by shard for its rank"):
        longspan.explain(model, local, ranks=2)


# ---- From a shell.


@pytest.mark.slow
def test_the_command_says_the_same(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = wider("llama", torch.bfloat16).config
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    said = longspan.explain(model, 8192, ranks=8, rank=3, device="h200")
    options = ["--tokens", "8k", "--ranks", "8", "--rank", "3", "--checkpointing"]
    command = [sys.executable, "-m", "longspan", "estimate"]
    done = subprocess.run(
        [*command, "--model", str(tmp_path / "config.json"), "--device", "h200", *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{said}\n"), done.stderr
    assert _estimating.main(["--model", str(tmp_path), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(said.to_json()))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "1M"], "the following arguments are required: --model"),
        (["--model", "nowhere"], "give --tokens 1M or --documents 4096,512, one of them"),
        (
            ["--model", "nowhere", "--tokens", "1M", "--offload", "hidden"],
            "--offload hidden moves what --checkpointing keeps; give both",
        ),
        (
            ["--model", "nowhere", "--tokens", "many"],
            "'many' is no number of tokens; expected such as 4096, 8k or 1M",
        ),
        (
            ["--model", "nowhere", "--tokens", "1M"],
            "--model is 'nowhere'; expected a config.json, or the folder of one",
        ),
        (
            ["--model", "{folder}", "--tokens", "64", "--rank", "3"],
            "`rank` is 3; expected 0 to 0",
        ),
    ],
)
def test_a_bad_argument_gets_a_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    decoder("llama").config.save_pretrained(tmp_path)
    given = [argument.replace("{folder}", str(tmp_path)) for argument in arguments]
    assert _estimating.main(given) == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"longspan estimate: {sentence}\n")
