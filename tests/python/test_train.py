"""`longspan train`: the losses of one rank for every number of them, and checkpoints that go on."""

from __future__ import annotations

import copy
import json
import math
import pathlib
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from longspan import __main__
from longspan._charts import curve_in_text, error_bars, loss_curve
from longspan._train_command import main
from longspan._training import FIRST_BYTE, Corpus, Course, _restore, check_fits, load, save
from longspan._written import write_whole

TEXT = "\n\n".join(
    f"Paragraph {n} says that {n} and {n + 1} are {2 * n + 1}." * (1 + n % 3) for n in range(40)
)


@pytest.fixture
def text(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def losses(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[float]:
    status = main([*arguments, "--tokens", "96", "--dtype", "float64", "--json"])
    told = capsys.readouterr()
    assert (status, told.err) == (0, "")
    return [json.loads(line)["loss"] for line in told.out.splitlines()]


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_losses_do_not_depend_on_the_ranks(
    text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 steps at N = 1 and 4; and 8 steps at one N, gone on from at another."""
    alone = losses(capsys, "llama", "--text", text, "--steps", "20")
    four = losses(capsys, "llama", "--text", text, "--steps", "20", "--ranks", "4")
    assert len(alone) == 20 and furthest(alone, four) <= 1e-10
    assert alone[-1] < alone[0] - 1.0
    folder = str(tmp_path / "kept")
    some = ["llama", "--text", text, "--save", folder]
    begun = losses(capsys, *some, "--steps", "8", "--every", "3", "--ranks", "3")
    names = ["step-000003.safetensors", "step-000006.safetensors", "step-000008.safetensors"]
    assert sorted(path.name for path in pathlib.Path(folder).iterdir()) == names
    rest = losses(capsys, *some, "--steps", "20", "--resume", folder, "--ranks", "2")
    assert furthest(begun + rest, alone) <= 1e-10
    older = str(pathlib.Path(folder) / names[1])
    again = losses(capsys, "llama", "--text", text, "--steps", "9", "--resume", older)
    assert furthest(again, alone[6:9]) <= 1e-10


def test_other_families_learn_too(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = losses(capsys, "gpt2", "--text", text, "--steps", "6", "--ranks", "2")
    assert all(map(math.isfinite, found)) and found[-1] < found[0]


def test_it_draws_the_curve(
    text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = tmp_path / "curve.svg"
    status = main(
        ["llama", "--text", text, "--steps", "4", "--tokens", "64", "--curve", str(curve)]
    )
    out = capsys.readouterr().out
    assert status == 0 and out.startswith("step 1/4  loss ")
    assert out.count("*") == 4 and out.endswith(f"curve: {curve}\n")
    assert ElementTree.parse(curve).getroot().tag.endswith("svg")


# ---- Bad input.


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(arguments)
    told = capsys.readouterr()
    assert (status, told.out) == (2, "") and told.err.count("\n") == 1
    assert told.err.startswith("longspan train: ")
    return told.err


def test_a_torn_or_foreign_checkpoint_is_refused_by_name(
    text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"
    some = ["llama", "--text", text, "--tokens", "64"]
    assert main([*some, "--steps", "2", "--save", str(folder)]) == 0
    capsys.readouterr()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    go_on = [*some, "--resume", str(path)]
    for kept in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        assert f"'{path}' is torn or no checkpoint" in refused(capsys, *go_on, "--steps", "4")
    path.write_bytes(whole)
    assert "has 2 steps already" in refused(capsys, *go_on, "--steps", "2")
    assert "--rate 0.003, and this" in refused(capsys, *go_on, "--rate", "1e-2")
    assert "--dtype float32, and this" in refused(capsys, *go_on, "--dtype", "float64")
    assert "documents of another kind" in refused(capsys, *go_on, "--split", "lines")
    other = ["gpt2", *go_on[1:]]
    assert "--family llama, and this training of gpt2" in refused(capsys, *other)
    pathlib.Path(text).write_text("another text\n\nof two documents")
    assert "is of another text" in refused(capsys, *go_on)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no checkpoint" in refused(capsys, *some, "--resume", str(empty))


def test_a_checkpoint_without_its_parts_is_refused(
    text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    some = ["llama", "--text", text, "--tokens", "64"]
    assert main([*some, "--steps", "1", "--save", str(tmp_path / "kept")]) == 0
    capsys.readouterr()
    (path,) = (tmp_path / "kept").iterdir()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    with safe_open(str(path), "pt") as file:
        facts = file.metadata()
    norm = "model.norm.weight"

    def told(change: dict[str, Any] | None = None, **other: str) -> str:
        kept = {k: v for k, v in (tensors | (change or {})).items() if v is not None}
        save_file(kept, path, facts | other)
        return refused(capsys, *some, "--resume", str(path))

    assert f"has nothing for {norm}" in told({f"model.{norm}": None})
    assert f"for {norm}, which is torch.float32" in told({f"model.{norm}": torch.ones(3)})
    assert f"has not both moments of AdamW for {norm}" in told({f"exp_avg_sq.{norm}": None})
    assert f"has not both moments of AdamW for {norm}" in told({f"exp_avg.{norm}": torch.ones(3)})
    weights = {name: None for name in tensors if not name.startswith("model.")}
    assert "has weights and no moments of AdamW" in told(weights)
    for other in ({"course": "[]"}, {"course": "1"}, {"losses": "1"}, {"format": "another"}):
        assert "was not written by longspan train" in told(**other)


#: (arguments after the text, what the sentence says)
REFUSED = [
    (["lama"], "like it are llama"),
    (["llama", "--ranks", "0"], "--ranks is 0; expected 1 to 64"),
    (["llama", "--steps", "0"], "--steps is 0; expected at least 1"),
    (["llama", "--every", "-1"], "--every is -1; expected at least 0"),
    (["llama", "--rate", "nan"], "--rate is nan"),
    (["llama", "--tokens", "2"], "--tokens is 2; expected 4 to"),
    (["gpt2", "--tokens", "4096"], "gpt2 has 1024 positions"),
    (["llama", "--curve", "/nowhere/x.svg"], "cannot be written: there is no folder '/nowhere'"),
    (["llama", "--save", "/dev/null"], "--save '/dev/null' is no folder"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_a_bad_argument_gets_a_sentence(
    arguments: list[str], sentence: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, *arguments, "--text", text)


def test_a_text_must_be_there(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.txt"
    assert "cannot be read" in refused(capsys, "llama", "--text", str(path))
    path.write_text("\n\n \n\n")
    assert "has no two bytes to learn" in refused(capsys, "llama", "--text", str(path))


def test_a_refused_family_ends_with_3(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gptj", "--text", text, "--steps", "1", "--tokens", "64"]) == 3
    assert "does not look its attention up by name" in capsys.readouterr().err


# ---- Parts.


def test_a_parameter_without_gradients_at_first_goes_on_as_it_was(tmp_path: pathlib.Path) -> None:
    """Such as an expert that nobody chose: AdamW counts its steps from the first gradient."""
    course = Course("none", 1, 0.1, "float64", "lines", "none")

    def stepped(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model[step // 2](torch.ones(2, dtype=torch.float64)).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    whole = torch.nn.ModuleList(torch.nn.Linear(2, 2).double() for _ in range(2))
    cut = copy.deepcopy(whole)
    adam = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (whole, cut)]
    stepped(whole, adam[0], range(4))
    stepped(cut, adam[1], range(3))
    save(tmp_path / "x", cut, adam[1], course, [1.0] * 3)
    begin = load(tmp_path / "x", course)
    check_fits(tmp_path / "x", begin, cut)
    again = torch.optim.AdamW(cut.parameters(), lr=0.1)
    _restore(cut, again, begin)
    stepped(cut, again, range(3, 4))
    assert all(torch.equal(a, b) for a, b in zip(cut.parameters(), whole.parameters(), strict=True))


def test_documents_restart_their_positions_and_foretell_nothing() -> None:
    corpus = Corpus.of(b"abc\n\nde\n\n\n\nf", "paragraphs")
    batch = corpus.batch(0, 8)
    assert (batch["input_ids"][0] - FIRST_BYTE).tolist() == list(b"abcdefab")
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert batch["labels"][0].eq(-100).tolist() == [p == 0 for p in batch["position_ids"][0]]
    assert corpus.batch(1, 8)["position_ids"][0].tolist() == [0, 0, 1, 0, 0, 1, 2, 0]
    alone = Corpus.of(b"ab", "lines").batch(0, 4)
    assert alone["position_ids"][0].tolist() == [0, 1, 0, 1]


def test_a_file_is_whole_or_the_one_before(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    write_whole(path, lambda beside: beside.write_text("one"))

    def torn(beside: pathlib.Path) -> Any:
        beside.write_text("tw")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_whole(path, torn)
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_charts_take_odd_numbers() -> None:
    for values in ([], [1.0], [2.0, 2.0], [3.0, math.nan, 1.0]):
        ElementTree.fromstring(loss_curve(values, 1, "a < b"))
        assert curve_in_text(values).count("*") == sum(map(math.isfinite, values))
    rows = [("one", 0.0, 1e-3), ("two", math.nan, math.inf), ("three", 1e-16, 1e-16)]
    ElementTree.fromstring(error_bars(rows, ("a", "b")))
    assert torch.is_tensor(Corpus.of(b"ab", "lines").tokens)


def test_the_entry_names_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["longspan", "--help"])
    assert __main__.main() == 0
    told = capsys.readouterr().out
    for name in ("draw", "plan", "info", "estimate", "verify", "train"):
        assert f"\n  {name} " in told
    monkeypatch.setattr(sys, "argv", ["longspan"])
    assert __main__.main() == 2
    monkeypatch.setattr(sys, "argv", ["longspan", "verify", "llama", "--ranks", "0"])
    assert __main__.main() == 2
    assert "longspan verify: --ranks is 0" in capsys.readouterr().err
