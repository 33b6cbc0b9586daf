"""The `longspan` program, called as a shell calls it.

LONGSPAN_CLI names the program; without it these tests skip.
"""

import json
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

PROGRAM = os.environ.get("LONGSPAN_CLI", "")
pytestmark = pytest.mark.skipif(
    not os.access(PROGRAM, os.X_OK),
    reason=f"LONGSPAN_CLI is {PROGRAM!r}; expected the path of the longspan program",
)

SLIDING = ["--mask", "sliding", "--window", "5"]
STREAM = ["--tokens", "64", "--ranks", "4"]
LAYOUTS = ["contiguous", "head-tail", "per-document-head-tail"]


def call(*arguments, **options):
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, timeout=60, **options
    )


def answer(*arguments):
    """What a call that must succeed prints."""
    done = call(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# ---- Refusals: (name, arguments, the whole sentence).

REFUSED = [
    (
        "no stream",
        ["--ranks", "4"],
        "no stream came; expected --tokens 64 or --documents 5,3/8,0/4",
    ),
    ("no ranks", ["--tokens", "64"], "--ranks is missing; expected the number of ranks, such as 4"),
    (
        "both streams",
        [*STREAM, "--documents", "5"],
        "--tokens and --documents both came; expected one of them",
    ),
    (
        "tokens not a number",
        ["--tokens", "many", "--ranks", "4"],
        "--tokens is 'many'; expected a whole number",
    ),
    (
        "tokens a fraction",
        ["--tokens", "6.5", "--ranks", "4"],
        "--tokens is '6.5'; expected a whole number",
    ),
    (
        "tokens with a rest",
        ["--tokens", "64k", "--ranks", "4"],
        "--tokens is '64k'; expected a whole number",
    ),
    (
        "tokens with a space",
        ["--tokens", " 64", "--ranks", "4"],
        "--tokens is ' 64'; expected a whole number",
    ),
    (
        "tokens empty",
        ["--tokens", "", "--ranks", "4"],
        "--tokens is empty; expected a whole number",
    ),
    (
        "tokens without value",
        ["--tokens=", "--ranks", "4"],
        "'--tokens=' has no value; write one after it",
    ),
    (
        "tokens negative",
        ["--tokens", "-5", "--ranks", "4"],
        "--tokens is '-5'; expected at least 0",
    ),
    (
        "tokens very negative",
        ["--tokens", "-99999999999999999999", "--ranks", "4"],
        "--tokens is '-99999999999999999999'; expected at least 0",
    ),
    (
        "tokens huge",
        ["--tokens", "2147483649", "--ranks", "4"],
        "--tokens is '2147483649'; expected at most 2147483648",
    ),
    (
        "tokens past 64 bits",
        ["--tokens", "99999999999999999999", "--ranks", "4"],
        "--tokens is '99999999999999999999'; expected at most 2147483648",
    ),
    (
        "tokens endless",
        ["--tokens", "9" * 500, "--ranks", "4"],
        f"--tokens is '{'9' * 40}...'; expected at most 2147483648",
    ),
    ("tokens twice", [*STREAM, "--tokens", "32"], "--tokens came 2 times; expected it once"),
    (
        "pad three times",
        [*STREAM, "--pad", "--pad", "--pad"],
        "--pad came 3 times; expected it once",
    ),
    (
        "tokens do not split",
        ["--tokens", "66", "--ranks", "4"],
        "Ownership: 66 tokens do not split over 4 ranks in 2 equal parts each; "
        "pad to 72 (--pad does it)",
    ),
    (
        "tokens do not split in one",
        ["--tokens", "66", "--ranks", "4", "--layout", "contiguous"],
        "Ownership: 66 tokens do not split over 4 ranks in equal parts; pad to 68 (--pad does it)",
    ),
    (
        "document does not split",
        ["--documents", "8,5", "--ranks", "2", "--layout", "per-document-head-tail"],
        "Ownership: document 1 has a slot of 5 tokens, which does not split over 2 ranks "
        "in 2 equal parts each; pad it to 8 (--pad does it)",
    ),
    (
        "padded too far",
        ["--tokens", "2147483648", "--ranks", "3", "--pad"],
        "draw: a stream of 2147483652 tokens; pictures go up to 2147483648",
    ),
    ("ranks zero", ["--tokens", "64", "--ranks", "0"], "--ranks is '0'; expected at least 1"),
    ("ranks negative", ["--tokens", "64", "--ranks", "-4"], "--ranks is '-4'; expected at least 1"),
    (
        "ranks huge",
        ["--tokens", "64", "--ranks", "1048577"],
        "--ranks is '1048577'; expected at most 1048576",
    ),
    (
        "layout unknown",
        [*STREAM, "--layout", "zigzag"],
        "--layout is 'zigzag'; expected contiguous, head-tail, per-document-head-tail or uneven; "
        "did you mean head-tail?",
    ),
    (
        "layout of the library",
        [*STREAM, "--layout", "ranges"],
        "--layout is 'ranges'; expected contiguous, head-tail, per-document-head-tail or uneven",
    ),
    (
        "compare unknown",
        [*STREAM, "--compare", ""],
        "--compare is ''; expected contiguous, head-tail, per-document-head-tail or uneven",
    ),
    (
        "compare and show",
        [*STREAM, "--compare", "contiguous", "--show", "work"],
        "--compare shows everything; leave --show out",
    ),
    (
        "uneven without sizes",
        [*STREAM, "--layout", "uneven"],
        "an uneven layout needs --sizes, such as --sizes 10,0,6",
    ),
    ("sizes without uneven", [*STREAM, "--sizes", "32,32"], "--sizes goes with --layout uneven"),
    (
        "sizes empty",
        ["--layout", "uneven", "--sizes", ""],
        "--sizes is empty; expected a list such as 10,0,6",
    ),
    (
        "sizes with a hole",
        ["--layout", "uneven", "--sizes", "10,,6"],
        "--sizes has an empty entry in '10,,6'; expected a list such as 10,0,6",
    ),
    (
        "sizes not numbers",
        ["--layout", "uneven", "--sizes", "10,x"],
        "--sizes entry 1 is 'x'; expected a whole number",
    ),
    (
        "sizes negative",
        ["--layout", "uneven", "--sizes", "10,-1"],
        "--sizes entry 1 is '-1'; expected at least 0",
    ),
    (
        "sizes too short",
        ["--layout", "uneven", "--sizes", "3,0,5", "--tokens", "9"],
        "--sizes add up to 8 but the stream has 9 tokens; change one",
    ),
    (
        "sizes too long",
        ["--layout", "uneven", "--sizes", "3,0,5", "--tokens", "7"],
        "--sizes add up to 8 but the stream has 7 tokens; change one, or --pad the stream",
    ),
    (
        "sizes of other ranks",
        ["--layout", "uneven", "--sizes", "3,0,5", "--ranks", "2"],
        "--ranks is 2 but --sizes has 3 entries; expected as many",
    ),
    (
        "sizes past the limit",
        ["--layout", "uneven", "--sizes", "2147483648,2147483648"],
        "draw: a stream of 4294967296 tokens; pictures go up to 2147483648",
    ),
    (
        "documents empty",
        ["--documents", "", "--ranks", "2"],
        "--documents is empty; expected a list such as 5,3/8,0/4",
    ),
    (
        "documents end in a comma",
        ["--documents", "5,", "--ranks", "2"],
        "--documents has an empty entry in '5,'; expected a list such as 5,3/8,0/4",
    ),
    (
        "documents with three numbers",
        ["--documents", "5/6/7", "--ranks", "2"],
        "--documents entry 0 is '5/6/7'; expected length or length/slot",
    ),
    (
        "documents without slot",
        ["--documents", "4,5/", "--ranks", "2"],
        "--documents entry 1 is empty; expected a whole number",
    ),
    (
        "documents longer than slot",
        ["--documents", "5/3", "--ranks", "1"],
        "Packing: document 0 has 5 tokens but a slot of 3; "
        "the padded length must be at least the length",
    ),
    (
        "documents past the limit",
        ["--documents", "2147483648,2147483648", "--ranks", "2"],
        "draw: a stream of 4294967296 tokens; pictures go up to 2147483648",
    ),
    (
        "mask unknown",
        [*STREAM, "--mask", "diagonal"],
        "--mask is 'diagonal'; expected causal, full, sliding or compressed",
    ),
    (
        "sliding without window",
        [*STREAM, "--mask", "sliding"],
        "--mask sliding needs --window, such as --window 4",
    ),
    (
        "window without sliding",
        [*STREAM, "--window", "4"],
        "--window goes with --mask sliding, not causal",
    ),
    (
        "window zero",
        [*STREAM, "--mask", "sliding", "--window", "0"],
        "--window is '0'; expected at least 1",
    ),
    (
        "compressed without ratio",
        [*STREAM, "--mask", "compressed"],
        "--mask compressed needs --ratio, such as --ratio 4",
    ),
    (
        "ratio without compressed",
        [*STREAM, "--ratio", "4"],
        "--ratio goes with --mask compressed, not causal",
    ),
    (
        "ratio not a number",
        [*STREAM, "--mask", "compressed", "--ratio", "4:1"],
        "--ratio is '4:1'; expected a whole number",
    ),
    (
        "prefix empty",
        [*STREAM, "--prefix", ""],
        "--prefix is empty; expected a list such as 10,0,6",
    ),
    ("prefix too many", [*STREAM, "--prefix", "1,2"], "Mask: 2 prefix lengths for 1 documents"),
    (
        "prefix too long",
        [*STREAM, "--prefix", "65"],
        "Mask: a prefix of 65 tokens in document 0 of 64",
    ),
    (
        "group without an end",
        [*STREAM, "--groups", "3-9,12"],
        "--groups entry 1 is '12'; expected begin-end, such as 3-9",
    ),
    (
        "groups empty",
        [*STREAM, "--groups", ""],
        "--groups is empty; expected a list such as 3-9,12-20",
    ),
    (
        "groups outside",
        [*STREAM, "--groups", "60-65"],
        "Mask: group [60, 65) of 64 tokens; groups are not empty and lie inside the stream",
    ),
    (
        "group reach unknown",
        [*STREAM, "--group-reach", "far"],
        "--group-reach is 'far'; expected whole-group or within-window",
    ),
    (
        "steps of a compressed mask",
        [*STREAM, "--mask", "compressed", "--ratio", "4", "--show", "steps"],
        "draw_steps: a compressed mask has no ring steps, its keys are no tokens; "
        "draw the mask and the work",
    ),
    (
        "states of a compressed mask",
        [*STREAM, "--mask", "compressed", "--ratio", "4", "--show", "states"],
        "--show states goes with a mask of tokens, and this one is compressed",
    ),
    (
        "show unknown",
        [*STREAM, "--show", "nothing"],
        "--show is 'nothing'; expected all, ownership, mask, steps, work or states",
    ),
    (
        "format unknown",
        [*STREAM, "--format", "png"],
        "--format is 'png'; expected svg, text or json",
    ),
    (
        "file of no format",
        [*STREAM, "-o", "picture.png"],
        "cannot tell a format from 'picture.png'; name it .svg, .txt or .json, or say --format",
    ),
    (
        "ascii picture",
        [*STREAM, "--format", "svg", "--ascii"],
        "--ascii goes with text; leave it out or say --format text",
    ),
    (
        "coloured json",
        [*STREAM, "--format", "json", "--color"],
        "--color goes with text; leave it out or say --format text",
    ),
    (
        "flag unknown",
        [*STREAM, "--colour"],
        "The following argument was not expected: --colour; see longspan draw --help",
    ),
    (
        "argument unknown",
        [*STREAM, "extra"],
        "The following argument was not expected: extra; see longspan draw --help",
    ),
    (
        "value missing",
        ["--ranks", "4", "--tokens"],
        "--tokens: 1 required N missing; see longspan draw --help",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [pytest.param(arguments, sentence, id=name) for name, arguments, sentence in REFUSED],
)
def test_a_bad_argument_gets_a_sentence(arguments, sentence, tmp_path):
    done = call("draw", *arguments, cwd=tmp_path)
    assert done.stderr == f"longspan draw: {sentence}\n"
    assert done.stdout == ""
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "longspan: no command came; try longspan draw --help"),
        (
            ["paint"],
            "longspan: The following argument was not expected: paint; see longspan --help",
        ),
        (
            ["verify", "all", "--ranks", "4"],
            "longspan verify: models live in Python; run python -m longspan verify",
        ),
        (
            ["info", "x"],
            "longspan info: The following argument was not expected: x; see longspan info --help",
        ),
    ],
)
def test_a_bad_command_gets_a_sentence(arguments, sentence):
    done = call(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence + "\n")


PLAN_REFUSED = [
    ("no stream", [], "--ranks is missing; expected the number of ranks, such as 4"),
    ("stream does not split", ["--tokens", "66", "--ranks", "4"],
     "Ownership: 66 tokens do not split over 4 ranks in 2 equal parts each; "
     "pad to 72 (--pad does it)"),
    ("strategy unknown", [*STREAM, "--strategy", "torus"],
     "--strategy is 'torus'; expected all, or ring, gathered, needed, head-parallel, "
     "head-parallel-ring or a list of them"),
    ("strategy of a paper", [*STREAM, "--strategy", "ulysses"],
     "--strategy is 'ulysses'; expected all, or ring, gathered, needed, head-parallel, "
     "head-parallel-ring or a list of them; did you mean head-parallel?"),
    ("strategy empty", [*STREAM, "--strategy", ""],
     "--strategy is empty; expected a list such as ring,needed"),
    ("all among others", [*STREAM, "--strategy", "ring,all"],
     "--strategy is 'all'; expected all, or ring, gathered, needed, head-parallel, "
     "head-parallel-ring or a list of them"),
    ("strategy twice", [*STREAM, "--strategy", "ring", "--strategy", "needed"],
     "--strategy came 2 times; expected it once"),
    ("teams of a ring", [*STREAM, "--head-ranks", "2"],
     "--head-ranks goes with --strategy head-parallel-ring, not ring"),
    ("teams that do not divide", [*STREAM, "--strategy", "head-parallel-ring",
                                  "--head-ranks", "3"],
     "Strategy: 4 ranks do not form teams of 3; head_ranks must divide the ranks"),
    ("teams too large", [*STREAM, "--strategy", "head-parallel-ring", "--head-ranks", "5"],
     "--head-ranks is '5'; expected at most 4"),
    ("rank too large", [*STREAM, "--rank", "4"], "--rank is '4'; expected at most 3"),
    ("rank negative", [*STREAM, "--rank", "-1"], "--rank is '-1'; expected at least 0"),
    ("rank of a table", [*STREAM, "--strategy", "all", "--rank", "0"],
     "--rank goes with one strategy; a table counts all ranks"),
    ("no heads", [*STREAM, "--heads", "0"], "--heads is '0'; expected at least 1"),
    ("heads not a number", [*STREAM, "--heads", "8x"],
     "--heads is '8x'; expected a whole number"),
    ("key heads do not divide", [*STREAM, "--heads", "8", "--key-heads", "3"],
     "--heads is 8 but --key-heads is 3; every key head serves as many heads"),
    ("channels too many", [*STREAM, "--head-dim", "100000"],
     "--head-dim is '100000'; expected at most 65536"),
    ("dtype unknown", [*STREAM, "--dtype", "int8"],
     "--dtype is 'int8'; expected bf16, fp16, fp32 or fp64"),
    ("keys that are no tokens", [*STREAM, "--mask", "compressed", "--ratio", "4"],
     "AttentionLayout: the keys of {mask} are not tokens; "
     "attend to them as a second block of keys"),
    ("bytes past counting",
     ["--tokens", "2147483648", "--ranks", "64", "--heads", "65536", "--head-dim", "65536"],
     "draw_plan: 2147483648 tokens over 64 ranks, head-tail, causal with 65536 heads "
     "of 65536 channels: too many bytes to count; plan fewer"),
    ("ascii picture", [*STREAM, "--format", "svg", "--ascii"],
     "--ascii goes with text; leave it out or say --format text"),
    ("a second layout", [*STREAM, "--compare", "contiguous"],
     "The following arguments were not expected: contiguous --compare; see longspan plan --help"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [pytest.param(arguments, sentence, id=name) for name, arguments, sentence in PLAN_REFUSED],
)
def test_a_bad_plan_gets_a_sentence(arguments, sentence):
    done = call("plan", *arguments)
    before, _, after = sentence.partition("{mask}")
    assert done.stderr.startswith(f"longspan plan: {before}")
    assert done.stderr.endswith(f"{after}\n")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert done.returncode == 2


# ---- The outside world.


def test_a_file_that_cannot_be_written_is_a_failure(tmp_path):
    path = tmp_path / "no" / "x.svg"
    done = call("draw", *STREAM, "-o", str(path))
    assert done.stderr == f"longspan draw: cannot write '{path}': No such file or directory\n"
    assert done.returncode == 2


def test_a_folder_cannot_be_written(tmp_path):
    done = call("draw", *STREAM, "--format", "svg", "-o", str(tmp_path))
    assert done.stderr == f"longspan draw: cannot write '{tmp_path}': Is a directory\n"
    assert done.returncode == 2


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "command", [["draw", *STREAM], ["plan", *STREAM], ["info"], ["info", "--json"]]
)
def test_a_full_disk_is_a_failure(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, *command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == f"longspan {command[0]}: cannot write to standard output\n"


# ---- What is drawn.


def panels(*arguments):
    return {
        panel["kind"]: panel
        for panel in json.loads(answer("draw", *arguments, "--format", "json"))["panels"]
    }


def test_json_counts_the_work():
    work = panels(*STREAM, "--layout", "contiguous")["work"]
    assert [rank["pairs"] for rank in work["ranks"]] == [136, 392, 648, 904]
    work = panels(*STREAM, "--layout", "head-tail")["work"]
    assert [rank["pairs"] for rank in work["ranks"]] == [520] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_json_names_every_owner_once(layout):
    owners = panels(*STREAM, "--layout", layout)["ownership"]
    stream = owners["strips"][0]["cells"]
    assert [cell["tokens"] for cell in stream] == [[t, t + 1] for t in range(64)]
    for rank, strip in enumerate(owners["strips"][1:]):
        held = [cell["tokens"][0] for cell in strip["cells"] if cell["rank"] == rank]
        assert held == [t for t in range(64) if stream[t]["rank"] == rank]
        assert len(held) == 16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "mask",
    [
        ["--mask", "causal"],
        ["--mask", "full"],
        SLIDING,
        ["--mask", "compressed", "--ratio", "4"],
        ["--mask", "causal", "--prefix", "3,0,8"],
        [*SLIDING, "--groups", "0-4,14-20"],
        [*SLIDING, "--groups", "0-4,14-20", "--group-reach", "within-window"],
    ],
)
def test_every_layout_and_mask_is_drawn(layout, mask, tmp_path):
    arguments = ["--documents", "5/8,0/4,12", "--ranks", "2", "--layout", layout, "--pad", *mask]
    for name in ("x.svg", "x.txt", "x.json"):
        assert answer("draw", *arguments, "-o", str(tmp_path / name)) == ""
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")
    assert json.loads((tmp_path / "x.json").read_text())["panels"]
    assert (tmp_path / "x.txt").read_text() == answer("draw", *arguments)


def test_pad_rounds_up():
    even = answer("draw", "--tokens", "66", "--ranks", "4", "--pad")
    assert even.startswith("72 tokens over 4 ranks")
    uneven = answer("draw", "--layout", "uneven", "--sizes", "10,0,6", "--tokens", "13", "--pad")
    assert uneven.startswith("16 tokens over 3 ranks, uneven")


def test_uneven_needs_only_its_sizes():
    work = panels("--layout", "uneven", "--sizes", "3,0,1")["work"]
    assert [rank["tokens"] for rank in work["ranks"]] == [3, 0, 1]


def test_two_layouts_are_drawn_beside_each_other():
    text = answer("draw", *STREAM, "--layout", "contiguous", "--compare", "head-tail")
    assert text.splitlines()[0] == "64 tokens over 4 ranks, causal: contiguous and head-tail"
    assert "904" in text and "520" in text


@pytest.mark.parametrize("show", ["ownership", "mask", "steps", "work"])
def test_one_panel_alone(show):
    assert list(panels(*STREAM, "--show", show)) == [show]


def test_runs_and_states():
    found = panels(*STREAM, "--layout", "contiguous", "--show", "states")
    assert list(found) == ["runs", "borders_forward", "borders_backward"]
    assert [run["before"] for run in found["runs"]["runs"]] == [None, 0, 1, 2]
    first = found["borders_forward"]["ranks"][0]
    assert first["bytes"] == 12 and [cell["to"] for cell in first["sends"]] == [1, 2, 3]


def test_text_is_plain_unless_asked():
    text = answer("draw", *STREAM)
    assert "\x1b" not in text
    assert "\x1b[" in answer("draw", *STREAM, "--color")
    assert answer("draw", *STREAM, "--ascii").isascii()
    assert max(map(len, text.splitlines())) <= 80


def test_the_largest_stream_is_drawn_in_time(tmp_path):
    path = tmp_path / "x.svg"
    answer("draw", "--tokens", "100000000", "--ranks", "4096", "--pad", "-o", str(path))
    assert path.stat().st_size < 200_000
    answer("draw", "--tokens", "2147483648", "--ranks", "1048576", "-o", str(path))
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("arguments", [["0", "1"], ["0", "3"], ["1", "1"], ["2", "2"]])
def test_trivial_streams_are_drawn(arguments, tmp_path):
    tokens, ranks = arguments
    path = tmp_path / "x.svg"
    answer("draw", "--tokens", tokens, "--ranks", ranks, "--layout", "contiguous", "-o", str(path))
    ElementTree.parse(path)


# ---- Plans.

SHAPE = ["--heads", "8", "--key-heads", "2", "--head-dim", "128", "--dtype", "bf16"]
STRATEGIES = ["ring", "gathered", "needed", "head-parallel", "head-parallel-ring"]


def planned(*arguments):
    return {
        panel["kind"]: panel
        for panel in json.loads(answer("plan", *arguments, "--format", "json"))["panels"]
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_sent_in_a_plan_arrives(strategy, layout):
    panels = planned(*STREAM, *SHAPE, "--layout", layout, "--strategy", strategy)
    plan = panels["plan"]
    assert len(plan["ranks"]) == 4
    for there, back in [("sends", "arrivals"), ("returns", "homecomings")]:
        for step in range(len(plan["ranks"][0]["steps"])):
            steps = [rank["steps"][step] for rank in plan["ranks"]]
            for unit in ("tokens", "bytes"):
                assert sum(s[there][unit] for s in steps) == sum(s[back][unit] for s in steps)
            met = {(r, peer) for r, s in enumerate(steps) for peer in s[there]["peers"]}
            assert met == {(peer, r) for r, s in enumerate(steps) for peer in s[back]["peers"]}
    for name in ("forward", "backward"):
        for rank, bar in zip(plan["ranks"], panels[f"sent_{name}"]["ranks"], strict=True):
            sent = rank["to_heads"][f"{name}_bytes"] + rank["to_tokens"][f"{name}_bytes"]
            sent += sum(s["sends"]["bytes"] for s in rank["steps"])
            if name == "backward":
                sent += sum(s["returns"]["bytes"] for s in rank["steps"])
            assert bar["bytes"] == sent
    assert sum(rank["pairs"] for rank in panels["work"]["ranks"]) == 2080


def test_small_bytes_written_out():
    forward = planned(*STREAM, *SHAPE, "--layout", "contiguous")["sent_forward"]
    assert [rank["bytes"] for rank in forward["ranks"]] == [16384, 32768, 49152, 0]
    wider = planned(*STREAM, *SHAPE, "--layout", "contiguous", "--value-dim", "64")["sent_forward"]
    assert [rank["bytes"] for rank in wider["ranks"]] == [12288, 24576, 36864, 0]
    double = planned(*STREAM, "--key-heads", "2", "--dtype", "fp32")["sent_forward"]
    assert max(rank["bytes"] for rank in double["ranks"]) == 2 * 49152


def test_strategies_are_compared():
    def rows(*arguments):
        panel = planned(*STREAM, *SHAPE, *arguments)["strategies"]
        return {row["strategy"]: row for row in panel["strategies"]}

    all_of_them = rows("--strategy", "all", "--layout", "contiguous")
    assert list(all_of_them) == [
        "ring",
        "gathered",
        "needed",
        "head_parallel",
        "head_parallel_ring, teams of 2",
    ]
    assert all_of_them["ring"]["most_pairs"] == 904
    assert all_of_them["head_parallel"]["most_pairs"] == 520
    assert all(row["mean_pairs"] == 520 for row in all_of_them.values())
    assert list(rows("--strategy", "needed,head_parallel")) == ["needed", "head_parallel"]
    text = answer("plan", *STREAM, *SHAPE, "--strategy", "all")
    assert "balance" in text and "head_parallel_ring, teams of 2" in text


def compared(*arguments):
    panel = planned(*STREAM, *arguments)["strategies"]
    return [row["strategy"] for row in panel["strategies"]], panel["caption"]


@pytest.mark.parametrize(("key_heads", "teams"), [("8", 4), ("2", 2), ("1", 1)])
def test_a_strategy_keeps_the_name_it_was_asked_for(key_heads, teams):
    shape = ["--heads", "8", "--key-heads", key_heads]
    names, caption = compared(*shape, "--strategy", "ring,head-parallel-ring")
    assert names == ["ring", f"head_parallel_ring, teams of {teams}"]
    assert ("does what head_parallel does" in caption) == (teams == 4)
    assert ("do what ring does" in caption) == (teams == 1)
    names, _ = compared(*shape, "--strategy", "all")
    assert names == [
        "ring",
        "gathered",
        "needed",
        "head_parallel",
        f"head_parallel_ring, teams of {teams}",
    ]
    alone = answer("plan", *STREAM, *shape, "--strategy", "head-parallel-ring")
    assert alone.startswith(f"Plan, head_parallel_ring, teams of {teams}, ")


@pytest.mark.parametrize("strategy", [*STRATEGIES, "all"])
def test_a_plan_is_drawn_in_every_format(strategy, tmp_path):
    arguments = ["--documents", "5/8,0/4,12", "--ranks", "2", "--pad", "--strategy", strategy]
    for name in ("x.svg", "x.txt", "x.json"):
        assert answer("plan", *arguments, "-o", str(tmp_path / name)) == ""
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")
    assert json.loads((tmp_path / "x.json").read_text())["panels"]
    assert (tmp_path / "x.txt").read_text() == answer("plan", *arguments)
    assert answer("plan", *arguments, "--ascii").isascii()
    assert max(map(len, answer("plan", *arguments).splitlines())) <= 80


def test_one_rank_alone():
    plan = planned(*STREAM, *SHAPE, "--rank", "2")
    assert list(plan) == ["plan"]
    assert [rank["rank"] for rank in plan["plan"]["ranks"]] == [2]


def test_the_largest_plan_is_drawn_in_time():
    for ranks in ("4096", "1048576"):
        text = answer("plan", "--tokens", "100000000", "--ranks", ranks, "--pad")
        assert len(text) < 30_000
        answer("plan", "--tokens", "100000000", "--ranks", ranks, "--pad", "--strategy", "all")


# ---- Facts.


def test_version_and_help():
    assert answer("--version").startswith("longspan ")
    assert "draw" in answer("--help")
    assert "--tokens" in answer("draw", "--help")
    assert "--strategy" in answer("plan", "--help")


def test_info_says_the_same_in_json():
    facts = json.loads(answer("info", "--json"))
    assert facts["version"] == answer("--version").split()[1]
    assert facts["cxx_standard"] >= 20
    text = answer("info")
    assert facts["compiler"] in text
    for name in facts["instruction_sets"] + facts["attention_levels"] + facts["build"]:
        assert name in text
    assert f"cuda_kernels:      {'yes' if facts['cuda_kernels'] else 'no'}\n" in text


def test_info_names_the_level_that_is_used():
    facts = json.loads(answer("info", "--json"))
    assert facts["attention_levels"][0] == "portable"
    assert facts["attention_levels"][-1] == facts["attention_level"]
    names = [line.split(":")[0] for line in facts["absent_levels"]]
    assert not set(names) & set(facts["attention_levels"])


@pytest.mark.slow
def test_info_from_python_adds_torch():
    import torch

    def ask(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "longspan", "info", *arguments], capture_output=True, text=True
        )

    facts = json.loads(ask("--json").stdout)
    assert facts["torch"] == torch.__version__
    assert facts["torch_cuda"] == torch.version.cuda
    assert len(facts["cuda_devices"]) == torch.cuda.device_count()
    assert facts.items() >= json.loads(answer("info", "--json")).items()
    text = ask().stdout
    assert text.startswith(answer("info"))
    assert f"torch:             {torch.__version__}\n" in text
    refused = ask("x")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == call("info", "x").stderr
