"""Groups: the ranks that hold one sequence together, and ways to get one."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from longspan import _C
from longspan._arguments import check_callable, check_finite, check_kind, check_whole, wrong

Result = TypeVar("Result")

#: A peer did not answer in time, or is gone: the RuntimeError that torch itself
#: raises for a backend that failed, torch.distributed.DistBackendError.
LostPeer = _C.LostPeer

_names = itertools.count()

#: Ranks of one process; each is a thread with sockets to all others.
_MOST_THREADS = 1024
#: Seconds that anybody waits: thirty years.
_LONGEST = 1e9


class Group(_C.Group):
    """The ranks that hold one sequence together; ``Group()`` is one rank alone.

    Does not keep its process group alive: once torch has destroyed that, communication
    raises and everything else still answers.
    """

    def __init__(self, name: str = "") -> None:
        if not isinstance(name, str):
            raise wrong("Group", "name", name, "the name of a process group")
        super().__init__(name)
        # Plain attributes, so that torch.compile can look through methods.
        self._name = name
        self._rank = super().rank()
        self._size = super().size()

    def __getattr__(self, attribute: str) -> Any:
        # Only for what is missing: all of it where __new__ alone made the object.
        if attribute in ("_name", "_rank", "_size"):
            raise TypeError("Group: this object was made by __new__ alone; call the class")
        raise AttributeError(f"Group: there is no attribute `{attribute}`")

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def name(self) -> str:
        """What operators take; "" for one rank alone."""
        return self._name

    def __repr__(self) -> str:
        # Tracebacks show the object also when there was no such group to wrap.
        return super().__repr__() if "_size" in self.__dict__ else "Group(not made)"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("Group: cannot be pickled; make it from the process group over there")

    @staticmethod
    def solo() -> Group:
        """One rank, no communication."""
        return Group()

    @staticmethod
    def named(name: str) -> Group:
        """The group that torch registered under this name."""
        return Group(name)

    @staticmethod
    def of(group: Any, *, timeout: float | timedelta | None = None) -> Group:
        """From a process group, a one-dimensional DeviceMesh, a group's name, or a
        Group. `timeout` (seconds) is how long a wait may last, for everyone who uses that
        process group; without it LONGSPAN_TIMEOUT counts, or what the process group was
        made with (1800 s unless told otherwise)."""
        if timeout is not None:
            made = Group.of(group)
            made._set_timeout(_seconds(timeout))
            return made
        if isinstance(group, Group):
            return group
        if isinstance(group, (str, _C.Group)):
            return Group(group if isinstance(group, str) else group.name)
        if isinstance(group, dist.ProcessGroup):
            return Group(_name_of(group))
        if hasattr(group, "get_group") and hasattr(group, "ndim"):
            if group.ndim != 1:
                raise ValueError(
                    f"Group: a mesh of {group.ndim} dimensions; name the one that "
                    f"holds the sequence, as in mesh['cp']"
                )
            return Group.of(group.get_group())
        raise TypeError(
            f"Group: expected a process group, a DeviceMesh or a name, got {type(group).__name__}"
        )

    @staticmethod
    def from_environment(*, timeout: float | timedelta | None = None) -> Group:
        """The default process group where there is one; else made from torchrun's
        or Slurm's variables (NCCL with CUDA devices, gloo without); else solo. For
        `timeout` see `of`; where the process group is made here, connecting has it too."""
        if not dist.is_initialized():
            launch = _C.launch_from(dict(os.environ))
            if launch is None or launch[1] == 1:
                return Group()
            _initialize(*launch, timeout)
        return Group.of(dist.group.WORLD, timeout=timeout)


# Made here, not where it is used: torch.compile cannot look into its constructor.
_ALONE = Group()


def ranks_of(group: Any) -> Group:
    """The `group` argument of a public function as a Group; None is one rank alone."""
    return _ALONE if group is None else Group.of(group)


def agree(group: Any, fields: Mapping[str, Any]) -> None:
    """Checks that all ranks were given equal fields: tensors, a Packing, an
    Ownership, bytes, or anything with a stable ``repr``; ValueError on every rank
    names those that differ. Every rank must call it."""
    check_kind("agree", "fields", fields, Mapping, "a mapping from names to values")
    _C.agree(Group.of(group), [(name, hash_value(value)) for name, value in fields.items()])


def run_ranks(
    ranks: int,
    body: Callable[[Group], Result],
    *,
    timeout: float | timedelta = 30.0,
) -> list[Result]:
    """Runs `body` on threads of this process, each a rank of one group over gloo,
    and returns their results by rank. For tests and examples.

    When a rank raises, the others end, and the first error that is not the
    consequence of another one is raised. One rank runs on this thread. Backward passes
    of CUDA tensors share one thread per device: there, ranks must be processes.
    """
    # Not the run_ranks of C++: these threads can be interrupted from the keyboard,
    # and groups of torch need no headers of gloo.
    check_whole("run_ranks", "ranks", ranks, 1, _MOST_THREADS)
    check_callable("run_ranks", "body", body)
    if not isinstance(timeout, timedelta):
        check_finite("run_ranks", "timeout", timeout)
        if not 0 <= timeout <= _LONGEST:
            raise ValueError(
                f"run_ranks: `timeout` is {timeout:g} s; expected 0 to {_LONGEST:g}, or a timedelta"
            )
        timeout = timedelta(seconds=float(timeout))
    if ranks == 1:
        return [body(Group())]
    run = _Run(ranks, timeout)
    results: list[Any] = [None] * ranks

    def rank_main(rank: int) -> None:
        try:
            results[rank] = body(run.join(rank))
        except BaseException as error:
            run.fail(rank, error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.end()
    return results


class _Run:
    """The groups of one call of run_ranks, and its first error."""

    def __init__(self, ranks: int, timeout: timedelta) -> None:
        self._names = [f"longspan/threads/{next(_names)}/{rank}" for rank in range(ranks)]
        self._timeout = timeout
        self._store = _c10d().HashStore()
        self._store.set_timeout(timeout)
        self._lock = threading.Lock()
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._error: BaseException | None = None
        self._why: str | None = None

    def join(self, rank: int) -> Group:
        gloo = _c10d().ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = self._timeout
        size = len(self._names)
        backend = gloo(self._store, rank, size, options)
        group: Any = dist.ProcessGroup(self._store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, backend)
        group._set_group_name(self._names[rank])
        _c10d()._register_process_group(self._names[rank], group)
        with self._lock:
            self._groups[rank] = group
            made = Group(self._names[rank])
            if self._why is not None:
                _C.interrupt(made.name, self._why)
        return made

    def fail(self, rank: int, error: BaseException) -> None:
        with self._lock:
            # That a peer is lost is news only until the peer says why.
            if self._error is None or (
                isinstance(self._error, LostPeer) and not isinstance(error, LostPeer)
            ):
                self._error = error
            if self._why is None:
                self._why = f"rank {rank} ended with an error"
            for peer in self._groups:
                _C.interrupt(self._names[peer], self._why)

    def end(self) -> None:
        for rank in self._groups:
            _c10d()._unregister_process_group(self._names[rank])
        self._groups.clear()
        if self._error is not None:
            raise self._error


def _c10d() -> Any:
    return torch._C._distributed_c10d


def _name_of(group: dist.ProcessGroup) -> str:
    """The name under which operators find a group; registers it if need be."""
    name = str(group.group_name)
    try:
        known = bool(name) and _c10d()._resolve_process_group(name) == group
    except (RuntimeError, LookupError, ValueError):
        known = False
    if not known:
        name = f"longspan/python/{next(_names)}"
        _c10d()._register_process_group(name, group)
    return name


def hash_value(value: Any) -> int:
    """What `agree` compares."""
    if isinstance(value, (torch.Tensor, _C.Packing, _C.Ownership, bytes)):
        return _C.hash_of(value)
    return _C.hash_of(repr(value).encode())


def _seconds(timeout: float | timedelta) -> float:
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(
            f"Group: timeout is of type {type(timeout).__name__}; expected seconds or a timedelta"
        )
    return float(timeout)


def _initialize(
    rank: int, size: int, address: str, port: int, timeout: float | timedelta | None
) -> None:
    # torchrun's own variables go to torch as they are: it may have a store
    # already.
    method = "env://" if os.environ.get("RANK") else f"tcp://{address}:{port}"
    cuda = torch.cuda.is_available()
    if cuda:
        local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
        torch.cuda.set_device(int(local) % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=method,
        rank=rank,
        world_size=size,
        timeout=None if timeout is None else timedelta(seconds=_seconds(timeout)),
    )
