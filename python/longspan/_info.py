"""`longspan info`: what the C++ program says of itself, and what torch offers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import longspan
from longspan._printing import printed


def torch_facts() -> dict[str, Any]:
    """What this interpreter's torch has for Longspan to run on. Every value is a
    string, a number, a list of them, or None."""
    cuda = torch.cuda.is_available()
    devices = range(torch.cuda.device_count()) if cuda else ()
    cudnn: Any = torch.backends.cudnn
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "cuda_devices": [_device(index) for index in devices],
        "cudnn": cudnn.version() if cudnn.is_available() else None,
        "backends": _backends(),
    }


def main(program: Path | None, arguments: Sequence[str]) -> int:
    """Prints the facts of the C++ `program`, where there is one, then torch's."""
    as_json = "--json" in arguments
    said = ""
    if program is not None:
        done = subprocess.run(
            [program, "info", *arguments], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode != 0 or {"-h", "--help"} & set(arguments):
            sys.stdout.write(done.stdout)
            return done.returncode
        said = done.stdout
    facts = torch_facts()
    if as_json:
        known = json.loads(said) if said else {"version": longspan.__version__}
        text = json.dumps(known | facts, indent=1) + "\n"
    else:
        text = said or f"{'version:':<18} {longspan.__version__}\n"
        text += "".join(f"{name + ':':<18} {_shown(value)}\n" for name, value in facts.items())
    return printed("longspan info", text)


def _device(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"{found.name} sm_{found.major}{found.minor} {found.total_memory >> 30}GiB"


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    names = []
    if dist.is_gloo_available():
        names.append("gloo")
    if dist.is_nccl_available():
        nccl: Any = torch.cuda.nccl
        version = nccl.version() if torch.cuda.is_available() else ()
        names.append("nccl" + ("-" + ".".join(map(str, version)) if version else ""))
    if dist.is_mpi_available():
        names.append("mpi")
    if dist.is_ucc_available():
        names.append("ucc")
    return names


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ("; " if any(" " in str(v) for v in value) else " ").join(map(str, value)) or "none"
    return str(value)
