"""Groups and collectives as Python sees them."""

import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from processes import outputs_of, start_ranks

import longspan
from longspan import Group, run_ranks
from longspan.comm import LostPeer


def test_solo_is_one_rank():
    group = Group.solo()
    assert (group.rank(), group.size(), group.name, group.sent_bytes) == (0, 1, "", 0)
    assert repr(group) == "Group(rank 0 of 1 (solo))"
    assert Group.of("").size() == 1 and Group.of(group) is group


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_run_ranks_returns_results_by_rank(ranks):
    assert run_ranks(ranks, lambda group: (group.rank(), group.size())) == [
        (rank, ranks) for rank in range(ranks)
    ]


def test_groups_of_a_run_end_with_it():
    names = run_ranks(2, lambda group: group.name)
    with pytest.raises(ValueError, match="no process group named"):
        Group.named(names[0])


def test_a_group_whose_process_group_is_gone_still_answers():
    def body(group):
        longspan.comm.rotate(torch.ones(2), 1, group=group)
        return group

    for rank, group in enumerate(run_ranks(2, body)):
        assert (group.rank(), group.size(), group.sent_bytes) == (rank, 2, 8)
        assert repr(group) == f"Group(rank {rank} of 2 (destroyed))" and group.timeout > 0
        gone = f"Group: no process group named '{group.name}' is alive; keep it, and destroy it"
        with pytest.raises(ValueError, match=gone):
            longspan.comm.rotate(torch.ones(2), 1, group=group)
        with pytest.raises(ValueError, match=gone):
            longspan.comm.agree(group, {"x": 1})
        with pytest.raises(ValueError, match=gone):
            Group.of(group.name)


def test_a_group_does_not_keep_the_process_group():
    gone = threading.Event()

    def body(group):
        process_group = torch.distributed.distributed_c10d._resolve_process_group(group.name)
        weakref.finalize(process_group, gone.set)
        kept = [group, Group.of(process_group)]
        assert kept[1].name == group.name
        return kept

    kept = run_ranks(2, body)
    assert len(kept) == 2 and gone.is_set()


def test_a_failing_rank_ends_the_run_with_its_error():
    def body(group):
        x = torch.ones(1)
        longspan.comm.rotate(x, 1, group=group)
        if group.rank() == 1:
            raise KeyError("mine")
        longspan.comm.rotate(x, 1, group=group)

    start = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, body)
    assert time.monotonic() - start < 10


def test_a_late_rank_is_named():
    def body(group):
        if group.rank() == 0:
            time.sleep(2)
        return longspan.comm.rotate(torch.ones(1), 1, group=group)

    with pytest.raises(LostPeer, match=r"rotate: rank 1 waited 0\.[56] s for rank 0: "):
        run_ranks(2, body, timeout=0.5)


def lose_in_an_operator(group):
    longspan.comm.rotate(torch.ones(1), 1, group=group)


def lose_in_a_function(group):
    longspan.comm.agree(group, {"x": 1})


@pytest.mark.parametrize("lose", [lose_in_an_operator, lose_in_a_function])
def test_a_lost_peer_has_its_own_type(lose):
    def body(group):
        if group.rank() == 0:
            time.sleep(1)
            return None
        with pytest.raises(RuntimeError) as raised:
            lose(group)
        return raised.type

    assert run_ranks(2, body, timeout=0.5) == [None, LostPeer]
    assert LostPeer is torch.distributed.DistBackendError


def test_a_peer_lost_in_backward_has_its_own_type():
    def body(group):
        x = torch.ones(1, requires_grad=True)
        y = longspan.comm.rotate(x, 1, group=group)
        if group.rank() == 0:
            time.sleep(1)
            return None
        with pytest.raises(RuntimeError) as raised:
            y.sum().backward()
        return raised.type

    assert run_ranks(2, body, timeout=0.5) == [None, LostPeer]


def test_an_error_that_only_reads_like_a_lost_peer_is_the_one_that_counts():
    def body(group):
        if group.rank() == 0:
            time.sleep(1)  # rank 1 has lost it by then
            raise RuntimeError("mine; look at the log of nobody")
        longspan.comm.rotate(torch.ones(1), 1, group=group)

    with pytest.raises(RuntimeError, match="mine"):
        run_ranks(2, body, timeout=0.5)


def test_two_runs_at_once():
    def body(group):
        return [
            longspan.comm.rotate(torch.full((8,), group.rank()), 1, group=group)[0].item()
            for _ in range(20)
        ]

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(run_ranks(3, body))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[[2] * 20, [0] * 20, [1] * 20]] * 2


@pytest.mark.slow
def test_groups_are_made_on_many_threads_at_once():
    """In a process of its own: what goes wrong ends the process."""
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import threading
from longspan import Group

def make():
    for _ in range(20000):
        kept = [Group() for _ in range(4)]

threads = [threading.Thread(target=make) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
""",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.stdout == "done\n", made.stderr[-500:]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_are_those_of_the_whole_sequence(ranks):
    sizes = [1 + rank for rank in range(ranks)]
    whole = torch.randn(sum(sizes), 3, dtype=torch.double)

    def body(group):
        x = whole.split(sizes)[group.rank()].clone().requires_grad_()
        full = longspan.comm.all_gather_tokens(x, axis=0, sizes=sizes, group=group)
        # Every rank's own part of the loss.
        weights = torch.arange(1, len(full) + 1).unsqueeze(1) * (group.rank() + 1)
        (full.square() * weights).sum().backward()
        return x.grad

    expected = 2 * whole * torch.arange(1, len(whole) + 1).unsqueeze(1)
    expected *= sum(range(1, ranks + 1))
    torch.testing.assert_close(torch.cat(run_ranks(ranks, body)), expected)


def test_collectives_of_one_rank_return_their_argument():
    group = Group.solo()
    x = torch.ones(4, 2)
    sizes = {"axis": 0, "sizes": [4], "group": group}
    assert longspan.comm.all_gather_tokens(x, **sizes) is x
    assert longspan.comm.reduce_scatter_tokens(x, **sizes) is x
    assert longspan.comm.rotate(x, 3, group=group) is x
    assert longspan.comm.roll(x, 4, **sizes) is x


@pytest.mark.slow
def test_operators_of_one_rank_pass_opcheck():
    x = torch.randn(4, 2, requires_grad=True)
    ops = torch.ops.longspan
    sends = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 3]])
    for op, arguments in [
        (ops.all_gather_tokens, (x, 0, [4], "")),
        (ops.reduce_scatter_tokens, (x, 0, [4], "")),
        (ops.all_to_all_heads, (x, 0, 1, [4], [2], "")),
        (ops.all_to_all_tokens, (x, 0, 1, [4], [2], "")),
        (ops.rotate, (x, 1, 0, [4], "")),
        (ops.roll, (x, 0, 1, [4], "")),
        (ops.exchange_needed, (x, 0, sends, 5, "")),
        (ops.return_needed, (torch.randn(5, 2, requires_grad=True), 0, sends, 4, "")),
    ]:
        torch.library.opcheck(op.default, arguments)


def test_needed_keys_arrive():
    packing = longspan.Packing.of([5, 3])
    mask = longspan.Mask.sliding(packing, 2)
    ownership = longspan.Ownership.contiguous(8, 2)
    table = longspan.comm.needed_table(mask, ownership)

    def body(group):
        x = torch.arange(4) + 4 * group.rank()
        return longspan.comm.exchange_needed(x, table, axis=0, group=group).tolist()

    results = run_ranks(2, body)
    assert results == [[0, 1, 2, 3], [3, 4, 5, 6, 7]]
    ranges = longspan.comm.received_ranges(table, ownership, 1)
    assert [token for begin, end in ranges for token in range(begin, end)] == results[1]


def test_agree_compares_values_of_many_kinds():
    def body(group):
        fields = {
            "ids": torch.arange(4),
            "packing": longspan.Packing.of([2, 2]),
            "ownership": longspan.Ownership.head_tail(8, 2),
            "layout": "head-tail",
        }
        longspan.comm.agree(group, fields)
        fields["layout"] = f"rank {group.rank()}"
        with pytest.raises(ValueError, match=r"different `layout` \(rank 1 differs from rank 0\)"):
            longspan.comm.agree(group, fields)

    run_ranks(2, body)


def test_refusals():
    with pytest.raises(ValueError, match="run_ranks: `ranks` is 0; expected 1 to 1024"):
        run_ranks(0, print)
    with pytest.raises(TypeError, match="Group: expected a process group, a DeviceMesh or a name"):
        Group.of(3)
    with pytest.raises(TypeError, match="Group: cannot be pickled"):
        Group().__reduce__()


def test_half_an_environment_is_refused(monkeypatch):
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("MASTER_", "SLURM_")):
            monkeypatch.delenv(name)
    assert Group.from_environment().size() == 1
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="RANK is set but WORLD_SIZE is not"):
        Group.from_environment()


@pytest.mark.slow
def test_two_processes():
    outputs = outputs_of(start_ranks("two_ranks.py", 2))
    assert all("done" in output for output in outputs), "\n----\n".join(outputs)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "backend"), [("destroy", "destroyed"), ("leave", "gloo")])
def test_a_program_with_groups_and_models_in_globals_ends_in_peace(way, backend):
    """Torch's groups end when they are destroyed, whoever still knows them: a thread
    of gloo that lets go of a tensor while the interpreter ends takes the process
    with it."""
    ranks = start_ranks("exit_two_ranks.py", 2, way, fresh=True)
    outputs = outputs_of(ranks)
    assert outputs == [f"Group(rank {rank} of 2 ({backend})) sent True\n" for rank in range(2)]
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_ranks_that_were_given_different_batches_all_say_which_key():
    def cut(group, **options):
        rows = torch.arange(32).view(2, 16) + (group.rank() == 2)
        batch = {"input_ids": rows, "labels": torch.arange(32).view(2, 16)}
        return longspan.shard(batch, group, **options)

    def refused(group):
        with pytest.raises(ValueError, match=r"different `input_ids` \(rank 2 differs from"):
            cut(group)
        return cut(group, check_agreement=False)["labels"].shape

    assert longspan.run_ranks(3, refused, timeout=10) == [(2, 6)] * 3


def test_ranks_that_were_given_different_layouts_all_say_so():
    def refused(group):
        batch = {"input_ids": torch.arange(32).view(2, 16)}
        layout = "head-tail" if group.rank() else "contiguous-rows"
        with pytest.raises(ValueError, match=r"different `layout` .* and `ownership`"):
            longspan.shard(batch, group, layout=layout)

    longspan.run_ranks(2, refused, timeout=10)


def test_a_deadline_may_be_any_whole_number() -> None:
    seconds = torch.tensor([5]).numpy()[0]  # an integer of numpy's, which timedelta refuses
    assert longspan.run_ranks(2, lambda group: group.timeout, timeout=seconds) == [5.0, 5.0]
