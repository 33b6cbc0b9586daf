"""Run by processes.py: a process that has imported what ranks need, and forks them. A rank
that starts so saves the seconds of processor time that the imports take.

Requests come over the socket whose number is the first argument: a line of JSON, with the
files that become the rank's input, output and errors. The answer is the rank's number. Ranks
are not children of this process but of who asked, who can wait for them as for any."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import runpy
import signal
import socket
import struct
import sys
import types

import torch
import torch.distributed

import longspan

with contextlib.suppress(ImportError):
    from transformers import LlamaForCausalLM  # noqa: F401  (brings what all models need)


def read(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = channel.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def serve(channel: socket.socket) -> dict[str, object] | None:
    """Returns in every rank, with what it is to do; None when nobody asks any more."""
    while True:
        header, files, _, _ = socket.recv_fds(channel, 4, 3)
        if len(header) < 4:
            return None
        request = json.loads(read(channel, struct.unpack("I", header)[0]))
        between = os.fork()
        if between == 0:
            rank = os.fork()
            if rank:
                channel.sendall(struct.pack("I", rank))
                os._exit(0)
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, max(*files, channel.fileno()) + 1)
            return dict(request)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


def become(request: dict[str, object]) -> None:
    """What the interpreter does for a script, or for "-c" and a program."""
    arguments = request["arguments"]
    environment = request["environment"]
    assert isinstance(arguments, list) and isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    script, *rest = arguments
    # In front of the rest is where this script lies; a rank's own comes there.
    places = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [place for place in places if place and place not in sys.path[1:]]
    if script != "-c":
        sys.argv = arguments
        sys.path[0] = str(pathlib.Path(script).parent)
        runpy.run_path(script, run_name="__main__")
        return
    sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(rest[0], "<string>", "exec"), vars(main))


if __name__ == "__main__":
    assert torch.distributed.is_available() and longspan.Group
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        become(asked)
