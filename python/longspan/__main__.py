"""`python -m longspan`: the command line, which is a C++ program. To its facts
about itself, `info` adds those about torch; `estimate` asks models, which live in Python."""

import os
import sys
from pathlib import Path


def main() -> int:
    package = Path(__file__).parent
    places = (package / "bin" / "longspan", package.parents[1] / "cli" / "longspan")
    program = next((place for place in places if place.exists()), None)
    arguments = sys.argv[1:]
    if arguments[:1] == ["info"]:
        from longspan import _info

        return _info.main(program, arguments[1:])
    if arguments[:1] == ["estimate"]:
        from longspan import _estimating

        return _estimating.main(arguments[1:])
    if program is not None:
        os.execv(program, [str(program), *arguments])
    print(
        "longspan: this build has no command line; build it with CLI11 and nlohmann-json installed",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
