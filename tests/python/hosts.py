"""Network namespaces as hosts: each has one cable to a switch, which can be pulled or made
slow. Nothing outside of them is touched, and they end with the processes that hold them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

#: No run lasts longer, whatever happens to the test.
_MOST_SECONDS = "300"

#: Bytes that a slow link lets pass at once.
BURST = 1 << 16


class Hosts:
    def __init__(self, count: int) -> None:
        self._spaces: list[subprocess.Popen[bytes]] = []
        self._ranks: list[subprocess.Popen[str]] = []
        self._port = 29500
        try:
            self._connect(count)
        except BaseException:
            self.close()
            raise

    def _connect(self, count: int) -> None:
        for _ in range(count + 1):
            self._spaces.append(
                subprocess.Popen(
                    ["unshare", "--net", "sh", "-c", f"echo; exec sleep {_MOST_SECONDS}"],
                    stdout=subprocess.PIPE,
                )
            )
        for space in self._spaces:
            assert space.stdout is not None
            if not space.stdout.readline():
                raise OSError("unshare --net made no namespace")
        self._in(-1, "ip", "link", "add", "switch", "type", "bridge")
        self._in(-1, "ip", "link", "set", "switch", "up")
        for host, space in enumerate(self._spaces[:-1]):
            cable = f"cable{host}"
            there = ("peer", "name", "eth0", "netns", str(space.pid))
            self._in(-1, "ip", "link", "add", cable, "type", "veth", *there)
            self._in(-1, "ip", "link", "set", cable, "master", "switch", "up")
            self._in(host, "ip", "link", "set", "lo", "up")
            self._in(host, "ip", "address", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
            self._in(host, "ip", "link", "set", "eth0", "up")

    def _in(self, space: int, *command: str) -> None:
        done = subprocess.run(
            ["nsenter", "--net", "--target", str(self._spaces[space].pid), *command],
            capture_output=True,
            text=True,
            timeout=20,
        )
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    def pull(self, host: int) -> None:
        self._in(-1, "ip", "link", "set", f"cable{host}", "down")

    def plug(self, host: int) -> None:
        self._in(-1, "ip", "link", "set", f"cable{host}", "up")

    def slow(self, host: int, bits_per_second: int) -> None:
        """What goes to this host, and from it."""
        rate = ("rate", f"{bits_per_second}bit", "burst", str(BURST), "limit", str(64 * BURST))
        shape = ("root", "tbf", *rate)
        self._in(-1, "tc", "qdisc", "replace", "dev", f"cable{host}", *shape)
        self._in(host, "tc", "qdisc", "replace", "dev", "eth0", *shape)

    def start(self, script: str, *arguments: str) -> list[subprocess.Popen[str]]:
        """One process a host; none sees the processes of another."""
        self._port += 1
        size = len(self._spaces) - 1
        path = pathlib.Path(__file__).parent / script
        names = {name: v for name, v in os.environ.items() if not name.startswith("SLURM_")}
        names |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(self._port)}
        names |= {"WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "eth0"}
        names |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        program = [*alone, sys.executable, str(path), *arguments]
        ranks = [
            subprocess.Popen(
                ["nsenter", "--net", "--target", str(self._spaces[rank].pid), *program],
                env=names | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        self._ranks += ranks
        return ranks

    def close(self) -> None:
        for process in [*self._ranks, *self._spaces]:
            if process.poll() is None:
                process.kill()
            process.communicate()


def why_not() -> str:
    """Why there can be no hosts here; empty where there can."""
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)}"
    try:
        hosts = Hosts(1)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no network namespaces: {error}"
    try:
        subprocess.run(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "true"],
            check=True,
            capture_output=True,
            timeout=20,
        )
        hosts.slow(0, 1_000_000)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no hosts of their own: {error}"
    finally:
        hosts.close()
    return ""


@contextlib.contextmanager
def hosts_of(count: int) -> Iterator[Hosts]:
    hosts = Hosts(count)
    try:
        yield hosts
    finally:
        hosts.close()
