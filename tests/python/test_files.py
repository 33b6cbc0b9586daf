"""What is written is whole or not there: a failed write leaves the old file as it was."""

from __future__ import annotations

import os
import pathlib
import resource
import signal
import stat
import subprocess
import sys

import pytest

CLI = os.environ.get("LONGSPAN_CLI", "")
BENCH = pathlib.Path(__file__).parents[2] / "bench"
needs_cli = pytest.mark.skipif(
    not pathlib.Path(CLI).is_file(), reason="built without the command line"
)


def draw(path: pathlib.Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [CLI, "draw", "--tokens", "16", "--ranks", "2", "-o", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def small_files() -> None:
    """As on a full disk: writing more than some bytes fails."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


def killed_by_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@needs_cli
def test_a_full_disk_leaves_the_old_picture(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "stream.svg"
    place.write_text("the old picture")
    done = draw(place, preexec_fn=small_files)
    assert done.returncode == 1
    assert done.stderr.startswith(f"longspan draw: cannot write '{place}'")
    assert place.read_text() == "the old picture"
    assert list(tmp_path.iterdir()) == [place]


@needs_cli
def test_a_killed_program_leaves_the_old_picture(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "stream.svg"
    place.write_text("the old picture")
    assert draw(place, preexec_fn=killed_by_large_files).returncode == -signal.SIGXFSZ
    assert place.read_text() == "the old picture"


@needs_cli
def test_a_new_picture_takes_the_place_of_the_old_one(tmp_path: pathlib.Path) -> None:
    place, link = tmp_path / "stream.svg", tmp_path / "link.svg"
    place.write_text("the old picture")
    place.chmod(0o640)
    link.symlink_to(place)
    assert draw(link).returncode == 0
    assert place.read_text().startswith("<svg")
    assert stat.S_IMODE(place.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, place]


@needs_cli
def test_a_pipe_is_written_to_and_stays(tmp_path: pathlib.Path) -> None:
    pipe = tmp_path / "pipe.svg"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        assert draw(pipe).returncode == 0
        assert reader.stdout is not None
        assert reader.stdout.read().startswith("<svg")
    assert pipe.is_fifo()


def test_a_report_is_whole_or_the_old_one(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "report.md"
    place.write_text("the old report")
    lines = (
        "import pathlib, sys\n"
        "from machine import write_whole\n"
        "write_whole(pathlib.Path(sys.argv[1]), 'x' * 1000)\n"
    )
    command = [sys.executable, "-c", lines, str(place)]
    environment = dict(os.environ, PYTHONPATH=str(BENCH), PYTHONDONTWRITEBYTECODE="1")
    failed = subprocess.run(
        command, env=environment, capture_output=True, check=False, preexec_fn=small_files
    )
    assert failed.returncode != 0
    assert place.read_text() == "the old report"
    assert list(tmp_path.iterdir()) == [place]
    subprocess.run(command, env=environment, check=True)
    assert place.read_text() == "x" * 1000
    assert list(tmp_path.iterdir()) == [place]
