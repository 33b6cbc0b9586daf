"""Adds up the results that GoogleTest, CTest and pytest left in a folder."""

import pathlib
import sys
import xml.etree.ElementTree as ET


def main(folder: pathlib.Path) -> int:
    passed = failed = skipped = 0
    for file in sorted(folder.rglob("*.xml")):
        for case in ET.parse(file).getroot().iter("testcase"):
            if file.name.startswith("ctest") and case.get("name", "").endswith("_tests"):
                continue  # a GoogleTest program, which has counted its own
            kinds = {child.tag for child in case}
            if kinds & {"failure", "error"}:
                failed += 1
            elif "skipped" in kinds or case.get("status") == "notrun":
                skipped += 1
            else:
                passed += 1
    print(f"total: {passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
