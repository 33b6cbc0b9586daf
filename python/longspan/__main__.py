"""`python -m longspan`: the command line, which is a C++ program."""

import os
import sys
from pathlib import Path


def main() -> int:
    package = Path(__file__).parent
    for program in (package / "bin" / "longspan", package.parents[1] / "cli" / "longspan"):
        if program.exists():
            os.execv(program, [str(program), *sys.argv[1:]])
    print(
        "longspan: this build has no command line; build it with CLI11 and nlohmann-json installed",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
