"""`longspan` and `python -m longspan`: the command line. Owners, masks and plans are a C++
program; models live in Python, and so do the commands that ask them."""

import os
import sys
from importlib import import_module
from pathlib import Path

#: Commands that are answered here: module, what it does.
_HERE = {
    "estimate": ("_estimating", "what a training step of a model computes, sends and keeps"),
    "verify": ("_verify_command", "shows that a model over ranks is the model itself"),
    "train": ("_train_command", "trains a tiny model of a family on the bytes of a text"),
}
_THERE = {
    "draw": "who owns, sees and computes what, as text or SVG",
    "plan": "what each rank computes and sends, for each strategy",
    "info": "how this was built, and what it runs on",
}


def main() -> int:
    arguments = sys.argv[1:]
    command = arguments[0] if arguments else ""
    if command in _HERE:
        found = import_module(f"longspan.{_HERE[command][0]}")
        return int(found.main(arguments[1:]))
    program = _program()
    if command == "info":
        from longspan import _info

        return _info.main(program, arguments[1:])
    if command in ("", "-h", "--help"):
        print(_help(), file=sys.stdout if command else sys.stderr)
        return 0 if command else 2
    if program is not None:
        os.execv(program, [str(program), *arguments])
    print(
        "longspan: this build has no command line; build it with CLI11 and nlohmann-json installed",
        file=sys.stderr,
    )
    return 1


def _program() -> Path | None:
    """The C++ program, where it was built: installed, or beside the build's Python."""
    package = Path(__file__).parent
    places = (package / "bin" / "longspan", package.parents[1] / "cli" / "longspan")
    return next((place for place in places if place.exists()), None)


def _help() -> str:
    commands = {name: what for name, (_, what) in _HERE.items()} | _THERE
    lines = [f"  {name:<10} {what}" for name, what in commands.items()]
    return "\n".join(
        [
            "Context parallelism: tokens of one sequence on many ranks",
            "",
            "longspan COMMAND ...; longspan COMMAND --help says more",
            "",
            *lines,
            "",
            "longspan --version",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
