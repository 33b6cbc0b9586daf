"""Which kernels there are on the CPU, and how the environment chooses one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import longspan

pytestmark = pytest.mark.slow  # every test starts an interpreter

SCRIPT = """
import torch, longspan
q = torch.randn(1, 2, 9, 8, dtype=torch.bfloat16)
print(longspan.which_kernel(q, q, q))
print(longspan.attend(q, q, q).isfinite().all().item())
"""
RUNNABLE = [level.name for level in longspan.testing.kernel_levels() if not level.why_not]
ABSENT = [level for level in longspan.testing.kernel_levels() if level.why_not]


def run(kernel: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "LONGSPAN_CPU_KERNEL"}
    if kernel is not None:
        environment["LONGSPAN_CPU_KERNEL"] = kernel
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True
    )


def test_levels_say_whether_they_run() -> None:
    assert RUNNABLE[0] == "portable"
    for level in longspan.testing.kernel_levels():
        assert repr(level) == (
            f"{level.name}, not here: {level.why_not}" if level.why_not else level.name
        )


@pytest.mark.parametrize("unset", [None, ""])
def test_the_best_runs_where_nothing_is_asked(unset: str | None) -> None:
    kernel, finite = run(unset).stdout.splitlines()
    assert finite == "True"
    expected = RUNNABLE[-1]
    if longspan.testing.kernel_levels()[-1].why_not:
        last = longspan.testing.kernel_levels()[-1]
        expected += f", not {last.name}: {last.why_not}"
    assert kernel == expected


@pytest.mark.parametrize("name", RUNNABLE[:-1])
def test_the_kernel_that_is_asked_for_runs(name: str) -> None:
    kernel, finite = run(name).stdout.splitlines()
    assert kernel == f"{name}, not {RUNNABLE[-1]}: LONGSPAN_CPU_KERNEL asks for {name}"
    assert finite == "True"


def test_other_types_run_other_code() -> None:
    """Levels that only multiply bfloat16 leave the rest to the code below them."""
    q = torch.randn(1, 2, 9, 8)
    assert not longspan.which_kernel(q, q, q).startswith(("amx", "avx512_bf16"))


def test_an_unknown_kernel_is_refused() -> None:
    result = run("avx1024")
    assert result.returncode != 0
    can = ", ".join(RUNNABLE)
    assert (
        f"LONGSPAN_CPU_KERNEL: `avx1024`, but no kernel has that name; this CPU can run {can}"
        in result.stderr
    )


@pytest.mark.skipif(not ABSENT, reason="this CPU can run all kernels")
def test_a_kernel_that_cannot_run_here_is_refused() -> None:
    for level in ABSENT:
        result = run(level.name)
        assert result.returncode != 0
        assert f"`{level.name}`, but {level.why_not}; this CPU can run" in result.stderr


def test_selected_keys_name_their_kernel() -> None:
    q, kv, lists = torch.randn(3, 4, 16), torch.randn(5, 16), torch.zeros(3, 2).int()
    w = torch.ones(3, 4)
    dense = longspan.which_kernel(q.unsqueeze(0), q.unsqueeze(0), q.unsqueeze(0))
    for operation in ("attend_selected", "attend_selected_backward", "selected_weights"):
        assert longspan.which_kernel(q, kv, lists, operation, value_dim=8) == dense
    for operation in ("select_keys", "score_selected", "score_selected_backward"):
        assert longspan.which_kernel(q, kv, w, operation, slots=2) == dense
    with pytest.raises(
        ValueError, match="`operation` is 'sideways'; expected one of attend, attend_"
    ):
        longspan.which_kernel(q, kv, lists, "sideways")
    with pytest.raises(ValueError, match="select_keys needs `slots`"):
        longspan.which_kernel(q, kv, w, "select_keys")
    with pytest.raises(ValueError, match="attend_selected has no `slots`; leave it out"):
        longspan.which_kernel(q, kv, lists, "attend_selected", slots=2)
    with pytest.raises(ValueError, match="on meta; there are kernels for the CPU and for CUDA"):
        longspan.which_kernel(q.to("meta"), kv.to("meta"), lists.to("meta"), "attend_selected")
    with pytest.raises(ValueError, match="the channels differ"):
        longspan.which_kernel(q, kv[:, :3], lists, "attend_selected")
