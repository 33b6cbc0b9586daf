"""`longspan verify`: what it finds right, wrong and refused, and what it says."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from verify_targets import Dying, Unmade

import longspan
from longspan import _measuring, _verify_command, _verifying
from longspan._hooks import guests_in
from longspan._measuring import Wishes, lengths_of
from longspan._models import state_of
from longspan._verify_command import _parser, _Target, _wishes, main

SMALL = ["--tokens", "96", "--documents", "4"]


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    told = capsys.readouterr()
    return status, told.out, told.err


def verdicts(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status, out, err = asked(capsys, *arguments, "--json")
    assert err == ""
    return status, json.loads(out)["models"]


#: A family of each kind, with as many ranks.
RIGHT = {"llama": "3", "glm_moe_dsa": "2", "deepseek_v4": "2", "gemma4_text": "4", "mixtral": "2"}


@pytest.mark.parametrize("family", RIGHT)
def test_a_family_of_each_kind_is_right(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, (found,) = verdicts(capsys, family, "--ranks", RIGHT[family], *SMALL)
    assert (status, found["word"]) == (0, "right"), found["why"]
    assert all(found["proof"].values()) and len(found["proof"]) == 4
    numbers = found["numbers"]
    assert numbers["leaks"] == {"documents": 0, "future tokens": 0}
    assert numbers["sent_bytes"] == numbers["predicted_bytes"]
    assert len(numbers["sent_bytes"]) == int(RIGHT[family])
    assert numbers["peak_bytes"] is None or numbers["peak_bytes"] > 1e5
    assert numbers["gradient_error"] <= max(2 * numbers["plain"]["gradient_error"], 1e-12)
    slots = numbers["slots"]
    assert slots is None if family != "glm_moe_dsa" else slots["differ"] == 0 < slots["of"]
    if family == "llama":  # float64 but for its norms, which differ in no bit
        assert numbers["plain"]["measured"]


def test_other_types_have_their_own_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    for dtype, least in (("float32", 1e-9), ("bfloat16", 1e-5)):
        status, (found,) = verdicts(capsys, "llama", "--ranks", "2", "--dtype", dtype, *SMALL)
        assert (status, found["word"]) == (0, "right"), found["why"]
        assert found["numbers"]["gradient_error"] > least


def test_slots_are_told_where_states_are_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["glm_moe_dsa", "--ranks", "2", "--dtype", "bfloat16", *SMALL]
    status, (found,) = verdicts(capsys, *arguments)
    assert (status, found["word"]) == (0, "right"), found["why"]
    assert found["numbers"]["slots"]["differ"] > 0 and "selected slots" not in found["checks"]


def test_a_refused_family_ends_with_3_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = asked(capsys, "gptj", "--ranks", "2", *SMALL)
    assert (status, err) == (3, "")
    assert out.startswith("gptj (GPTJForCausalLM): refused in ")
    assert "does not look its attention up by name" in out


def test_a_terminal_is_told_what_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, out, err = asked(capsys, "llama", "gptj", "--ranks", "2", *SMALL)
    assert status == 3 and "longspan verify: " not in out
    for line in ("llama: the proof ...", "llama: 2 ranks ...", "gptj: making the model ..."):
        assert f"longspan verify: {line}\n" in err
    assert "[1/2] llama (LlamaForCausalLM): right in " in err


# ---- Wrong models: each is found by the row that is for it.


def planted(monkeypatch: pytest.MonkeyPatch, fault: Any, family: str = "llama") -> dict[str, Any]:
    """What is said of a family over ranks whose share or model somebody spoils."""
    before = _measuring.parallelize

    def spoiled(model: Any, group: Any = None, **options: Any) -> Any:
        made = before(model, group, **options)
        fault(made, group)
        # As if it had been there when the model was let in.
        state_of("spoiled", made).guests = guests_in(made)
        return made

    monkeypatch.setattr(_measuring, "parallelize", spoiled)
    from longspan._families import Family, made

    wishes = Wishes(ranks=2, tokens=96, documents=4)
    found = _verifying.verify(family, lambda _: made(Family(family, family)), wishes)
    assert found.word == "wrong", found
    return {row.what: row.holds for row in found.rows}


def test_a_rank_with_another_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(model: Any, group: Any) -> None:
        with torch.no_grad():
            # Behind the numbers that sum_gradients compares.
            model.model.layers[1].mlp.up_proj.weight[1, 0] += 1e-3 * group.rank()

    holds = planted(monkeypatch, fault)
    assert holds["worst gradient"] is False and holds["leaks: documents"] is True


def test_a_leak_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(model: Any, group: Any) -> None:
        def mixed(module: Any, given: Any, out: Any) -> Any:
            return out + 1e-3 * out.mean(1, keepdim=True)

        mixed.__module__ = "torch"  # the calls of models refuse others
        model.model.layers[0].mlp.register_forward_hook(mixed)

    holds = planted(monkeypatch, fault)
    assert holds["leaks: documents"] is False and holds["leaks: future tokens"] is False
    assert holds["logits"] is False


def test_bytes_that_nobody_predicted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(model: Any, group: Any) -> None:
        def sends(*_: Any) -> None:
            longspan.comm.all_gather_tokens(
                torch.zeros(1), axis=0, sizes=[1] * group.size(), group=group
            )

        model.model.layers[0].mlp.register_forward_hook(sends)

    holds = planted(monkeypatch, fault)
    assert holds["bytes sent"] is False
    assert all(held is not False for what, held in holds.items() if what != "bytes sent")


def test_another_selection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(model: Any, group: Any) -> None:
        with torch.no_grad():
            model.model.layers[0].self_attn.indexer.weights_proj.weight.mul_(-1)

    holds = planted(monkeypatch, fault, "glm_moe_dsa")
    assert holds["selected slots"] is False and holds["worst gradient"] is False
    assert holds["leaks: documents"] is True and holds["bytes sent"] is True


def test_slots_that_differ_are_counted_with_their_scores() -> None:
    q, k = torch.eye(3)[:, None], torch.tensor([[4.0, 0, 0], [2, 0, 0], [1, 0, 0]])
    found = _measuring._scores([q, k, torch.ones(3, 1)], 0, torch.tensor([0, 2]))
    assert found.tolist() == [4.0, 1.0]
    assert _measuring._joined([torch.tensor([[0, 1], [0, 1]])], [5]).tolist() == [[5, -1], [5, 6]]


# ---- Folders.


def folder(path: pathlib.Path, **options: Any) -> tuple[pathlib.Path, Any]:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **options
    )
    model = transformers.LlamaForCausalLM(config)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(path)
    return path, model


def test_a_folder_is_verified_by_its_twin_or_its_weights(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = folder(tmp_path / "model")
    for more in ([], ["--weights"]):
        status, (found,) = verdicts(capsys, str(path), "--ranks", "2", *SMALL, *more)
        assert (status, found["word"]) == (0, "right"), found["why"]
    (path / "model.safetensors").unlink()
    assert verdicts(capsys, str(path), "--ranks", "2", *SMALL)[0] == 0  # a twin needs none
    status, out, err = asked(capsys, str(path), "--ranks", "2", *SMALL, "--weights")
    assert (status, out) == (2, "") and "do not load" in err


def test_weights_of_another_shape_are_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = folder(tmp_path / "model", intermediate_size=48)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    status, out, err = asked(capsys, str(path), "--ranks", "2", *SMALL, "--weights")
    assert (status, out) == (2, "")
    assert "weights" in err and err.count("\n") == 1, err


def test_torn_missing_and_infinite_weights_are_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    path, _ = folder(tmp_path / "model")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    last = sorted(tensors)[-1]

    def told() -> str:
        status, out, err = asked(capsys, str(path), "--ranks", "2", *SMALL, "--weights")
        assert (status, out, err.count("\n")) == (2, "", 1), (status, out, err)
        return err

    for kept in (0, 7, len(whole) // 2):
        file.write_bytes(whole[:kept])
        assert f"the weights in '{path}' do not load: " in told()
    metadata = {"format": "pt"}
    save_file({k: v for k, v in tensors.items() if k != last}, file, metadata)
    assert f"are not those of its config.json: missing {last} and 0 more" in told()
    save_file(tensors | {last: tensors[last] * torch.nan}, file, metadata)
    assert f"are not all finite: {last}" in told()


#: What is in config.json, what the sentence says, and the exit status.
CONFIGS = {
    "none": (None, "has no config.json; expected the folder of a model", 2),
    "torn": ('{"model_type": "lla', "is no configuration of transformers", 2),
    "a list": ("[]", "is no configuration of transformers", 2),
    "nothing": ("{}", "is no configuration of transformers", 2),
    "unknown": ('{"model_type": "lama"}', "is no configuration of transformers", 2),
    "code": (
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}',
        "is no configuration of transformers",
        2,
    ),
    "no decoder": ('{"model_type": "clip"}', "of which transformers makes no causal model", 2),
    "refused": ('{"model_type": "gptj"}', "does not look its attention up by name", 3),
    "positions": (
        '{"model_type": "llama", "max_position_embeddings": 1}',
        "has 1 positions, too few for documents",
        2,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_that_is_no_model_gets_a_sentence(
    name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, sentence, expected = CONFIGS[name]
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    status, out, err = asked(capsys, str(tmp_path), "--ranks", "2", *SMALL)
    assert status == expected
    assert sentence in (out if expected == 3 else err)
    assert (err if expected == 3 else out) == ""
    assert expected == 3 or err.count("\n") == 1


# ---- Reports.


def test_the_report_is_one_page_without_scripts(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "out.html"
    arguments = ["llama", "gptj", "--ranks", "2", *SMALL, "--report", str(report)]
    status, out, _ = asked(capsys, *arguments)
    assert status == 3 and out.endswith(f"report: {report}\n")
    assert "1 right, 1 refused" in out
    page = report.read_text()
    assert "<script" not in page and not re.search(r'(src|href)="(?!data:|#)', page)
    for word in ("1 right, 1 refused", "worst gradient", "numbering holds"):
        assert word in page
    assert page.count("data:image/svg+xml") >= 2
    assert list(tmp_path.iterdir()) == [report]  # nothing beside it
    assert report.stat().st_mode & 0o077  # others may read what they could


def test_runs_and_states_are_drawn_with_what_is_sent(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All layers of Mamba 2 are alike, so what one of them sends is known from the whole."""
    report = tmp_path / "out.html"
    arguments = ["mamba2", "--ranks", "3", *SMALL, "--report", str(report)]
    status, (found,) = verdicts(capsys, *arguments)
    assert (status, found["word"]) == (0, "right"), found["why"]
    page = report.read_text()
    assert "<h3>Runs and states: layers with a convolution of 4 tokens and states of " in page
    assert "Who owns, sees and computes what" not in page  # nobody attends
    images = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    drawn = [text for text in (base64.b64decode(i).decode() for i in images) if "runs<" in text]
    assert len(drawn) == 1 and ">document 0<" in drawn[0]
    bytes_sent = [int(count) for count in re.findall(r">In all (\d+) bytes", drawn[0])]
    layers = sum(one["layer"].startswith("layer ") for one in found["layers"])
    assert layers > 1 and len(bytes_sent) == 2
    assert sum(found["numbers"]["sent_bytes"]) == layers * sum(bytes_sent) > 0


def test_convolutions_are_drawn_beside_attention(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "out.html"
    status, (found,) = verdicts(capsys, "lfm2", "--ranks", "2", *SMALL, "--report", str(report))
    assert (status, found["word"]) == (0, "right"), found["why"]
    page = report.read_text()
    assert "<h3>Runs, and what is before them: layers with a convolution of 3 tokens</h3>" in page
    assert "<h3>Who owns, sees and computes what: causal layers</h3>" in page


@pytest.mark.parametrize("where", ["missing/out.html", ".", "pipe", "text/out.html"])
def test_a_report_that_cannot_be_written_is_said_first(
    where: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")  # as /dev/null is: what is no file is not replaced by one
    (tmp_path / "text").write_text("")
    path = str(tmp_path / where)
    status, out, err = asked(capsys, "llama", *SMALL, "--report", path)
    assert (status, out) == (2, "") and f"the report '{path}' cannot be written: " in err


# ---- Bad arguments: (arguments, what the sentence says).

REFUSED = [
    (["lama"], "'lama' is neither a causal family of transformers, such as llama, nor a folder"),
    (["lama"], "like it are llama"),
    (["./none"], "'./none' has no config.json"),
    (["llama", "--ranks", "0"], "--ranks is 0; expected 1 to 64"),
    (["llama", "--tokens", "many"], "'many' is no number of tokens"),
    (["llama", "--tokens", "8"], "--tokens is 8; expected 16 to"),
    (["llama", "--documents", "0"], "--documents is 0; expected at least 1"),
    (["llama", "--weights"], "--weights goes with a folder, and 'llama' is none"),
    (["all", "--weights"], "--weights goes with a folder"),
    (["all", "llama"], "`all` are all families; give it alone"),
    (["llama", "--jobs", "0"], "--jobs is 0"),
    (["llama", "--dtype", "int8"], "--dtype is 'int8'; expected float64, float32, bfloat16"),
    ([], "MODEL"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_a_bad_argument_gets_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = asked(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("longspan verify: ") and sentence in err and err.count("\n") == 1


def test_documents_make_up_the_tokens() -> None:
    for tokens in (8, 64, 4096):
        for documents in (1, 2, 3, 4):
            for seed in range(3):
                lengths = lengths_of(tokens, documents, seed)
                assert sum(lengths) == tokens and len(lengths) == documents and min(lengths) >= 1
                assert documents < 3 or 1 in lengths


# ---- Several models.


@pytest.mark.slow
def test_a_process_that_ends_costs_its_own_line() -> None:
    """Also where it had verified others, and with others behind it."""
    targets = [Unmade("a"), Dying("b"), Unmade("c")]
    one, two, three = _verify_command._side_by_side(targets, Wishes(ranks=2), 1)
    assert (one.model, one.word, one.why) == ("a", "not made", "ValueError: nobody makes a")
    assert (two.model, two.word) == ("b", "wrong")
    assert two.why.startswith("the process that verified it ended: ")
    assert (three.model, three.word) == ("c", "not made")


@pytest.mark.deep  # three processes that import transformers
def test_models_side_by_side_are_told_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["llama", "gptj", "qwen3", "bart"]
    arguments = [*names, "--ranks", "2", *SMALL]
    status, found = verdicts(capsys, *arguments, "--jobs", "2")
    assert status == 3 and [one["model"] for one in found] == names
    assert [one["word"] for one in found] == ["right", "refused", "right", "refused"]
    _, (alone,) = verdicts(capsys, "llama", *arguments[4:])
    assert found[0]["numbers"]["loss"] == alone["numbers"]["loss"]


def test_models_that_scan_token_by_token_get_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless somebody asked for a number; the first row says so."""
    found = {}
    for tokens in ((), ("--tokens", "64")):
        for family in ("mamba", "llama"):
            wishes = _wishes(_parser().parse_args([family, "--ranks", "2", *tokens]))
            if not tokens:
                assert (wishes.tokens, wishes.fewer) == (4096, 1024)
                wishes = dataclasses.replace(wishes, tokens=80, fewer=40)
            verdict = _verifying.verify(family, _Target(family).make, wishes)
            assert verdict.word == "right", verdict.why
            found[family, bool(tokens)] = verdict.rows[0].found
    assert found["mamba", False].startswith("40 tokens, 7 documents of 1 to ")
    assert found["mamba", False].endswith(" (it scans token by token)")
    assert found["mamba", True].startswith("64 tokens") and "scans" not in found["mamba", True]
    assert found["llama", False].startswith("80 tokens") and "scans" not in found["llama", False]


@pytest.mark.slow
def test_processes_give_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["llama", "--ranks", "2", *SMALL]
    command = [sys.executable, "-m", "longspan", "verify", *arguments, "--json"]
    done = subprocess.run(
        [*command, "--launcher", "torchrun"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    _, (one,) = verdicts(capsys, *arguments)
    (other,) = json.loads(done.stdout)["models"]
    for key in ("loss", "gradient_error", "sent_bytes"):
        assert one["numbers"][key] == other["numbers"][key]
