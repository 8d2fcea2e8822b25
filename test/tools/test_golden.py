"""``wam golden``: passes on the recordings, names what is wrong with a spoiled folder, and assumes no sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from test.golden_files import GOLDEN_DIR, golden
from test.tools.other_recordings import SIZES, Maker
from wam_policy_ros.tools.golden import compare_folder, table
from wam_policy_ros.tools.golden_suite.folder import Group, Row, correlation, difference
from wam_policy_ros.tools.main import main

QUICK = ("dit_weights.safetensors", "dit_io.safetensors", "dit_kv.safetensors", "schedulers.safetensors")


@pytest.fixture
def quick(tmp_path):
    """A copy of the recordings that take no time."""
    for name in QUICK:
        golden(name)  # skips with the reason
        shutil.copy(GOLDEN_DIR / name, tmp_path / name)
    return tmp_path


def _run(folder, capsys, *options):
    status = main(["golden", str(folder), *options])
    out = capsys.readouterr().out
    return status, [line for line in out.splitlines() if line and not line.startswith("file ")], out


def _edit(path: Path, change):
    with safe_open(path, "pt") as f:
        tensors, metadata = {k: f.get_tensor(k) for k in f.keys()}, f.metadata()  # noqa: SIM118
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata)


# -- the recordings ---------------------------------------------------------------------------------------------


def test_the_recordings_pass(tmp_path, capsys):
    """All but the closed loop, which has its own test."""
    golden("dit_io.safetensors")
    shutil.copytree(GOLDEN_DIR, tmp_path / "g", ignore=shutil.ignore_patterns("e2e_*"))
    (tmp_path / "g" / "README.md").write_text("notes are not recordings")
    status, lines, _ = _run(tmp_path / "g", capsys, "--json", str(tmp_path / "table.json"))
    assert status == 0 and not any("MISS" in line for line in lines)
    records = json.loads((tmp_path / "table.json").read_text())
    others = {"t5.safetensors", "clip.safetensors", "vae_io.safetensors", "data.json", "data.safetensors"}
    assert {r["file"] for r in records} >= {*QUICK[1:], *others, "data_images.safetensors", "msgpack/*"}
    assert all(r["ok"] and r["tensors"] > 0 for r in records)
    assert f"{len(records)} of {len(records)} comparisons" in lines[-1]


def _missed(lines):
    return [line for line in lines if "MISS" in line]


def test_quick_copy_passes(quick, capsys):
    status, lines, _ = _run(quick, capsys)
    assert status == 0 and len(lines) == 4 + 3 + 1


def test_perturbed_weight(quick, capsys):
    def change(tensors):
        tensors["blocks.1.ffn.0.weight"][3, 5] += 0.05

    _edit(quick / "dit_weights.safetensors", change)
    status, lines, _ = _run(quick, capsys)
    assert status == 1 and "FAIL" in lines[-1]
    missed = _missed(lines)
    assert len(missed) == 3 and all(line.startswith("dit_") for line in missed)  # flows, intermediates, cache


def test_perturbed_recording_names_the_tensor(quick, capsys):
    def change(tensors):
        tensors["chunk2.denoise.neg.action_out"][0, 3, 5] += 1e-3

    _edit(quick / "dit_io.safetensors", change)
    status, lines, _ = _run(quick, capsys)
    (missed,) = _missed(lines)
    assert status == 1 and "chunk2.denoise.neg.action_out" in missed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["dit_weights.safetensors", "dit_io.safetensors"])
def test_not_finite(quick, capsys, name, value):
    key = {"dit_weights.safetensors": "head.head.bias", "dit_io.safetensors": "prefill0.cond.video_out"}[name]
    _edit(quick / name, lambda t: t[key].view(-1)[:1].fill_(value))
    status, lines, _ = _run(quick, capsys, "--json", str(quick.parent / "t.json"))
    assert status == 1 and any("inf" in line and line.startswith("dit_io") for line in _missed(lines))
    records = json.loads((quick.parent / "t.json").read_text(), parse_constant=lambda c: pytest.fail(f"not JSON: {c}"))
    assert any(r["worst"] is None and not r["ok"] for r in records)


def test_missing_companion(quick, capsys):
    (quick / "dit_weights.safetensors").unlink()
    status, lines, _ = _run(quick, capsys)
    missed = _missed(lines)
    assert status == 1 and [line.split()[0] for line in missed] == ["dit_io.safetensors", "dit_kv.safetensors"]
    assert all("not compared" in line for line in missed)


def test_missing_tensor(quick, capsys):
    _edit(quick / "dit_weights.safetensors", lambda t: t.pop("head.head.bias"))
    status, _, out = _run(quick, capsys)
    assert status == 1 and "RuntimeError" in out and "dit" in out


def test_what_is_not_recorded_is_not_compared(quick, capsys):
    """One output less, and then a recording of one branch alone."""
    _edit(quick / "dit_io.safetensors", lambda t: t.pop("chunk2.denoise.neg.action_out"))
    status, lines, _ = _run(quick, capsys)
    (flows,) = [line for line in lines if "video and action flows" in line]
    assert status == 0 and " 35 " in flows

    def without_neg(tensors):
        for key in [k for k in tensors if ".neg." in k or k.endswith("_neg")]:
            del tensors[key]

    for name in ("dit_io", "dit_kv"):
        _edit(quick / f"{name}.safetensors", without_neg)
    status, lines, _ = _run(quick, capsys)
    (flows,) = [line for line in lines if "video and action flows" in line]
    assert status == 0 and " 18 " in flows


@pytest.mark.parametrize(
    ("file", "tensor"),
    [
        ("dit_io.safetensors", "chunk1.denoise.cond.hidden_after_block9"),
        ("dit_io.safetensors", "chunk9.denoise.cond.video_out"),
        ("dit_kv.safetensors", "chunk9.prefill.cond.kv"),
        ("schedulers.safetensors", "unipc_a.x_afters"),
        ("schedulers.safetensors", "bf16.unipc_z.x_after"),
        ("schedulers.safetensors", "flowmatch16.heun_x_after"),
    ],
)
def test_a_recorded_tensor_without_a_rule_is_a_miss(quick, capsys, file, tensor):
    """A name that is silently passed over could hide anything."""
    _edit(quick / file, lambda t: t.__setitem__(tensor, torch.randn(2, 3)))
    status, lines, _ = _run(quick, capsys)
    (missed,) = _missed(lines)
    assert status == 1 and missed.startswith(file) and tensor in missed and "not compared" in missed


def test_outputs_whose_inputs_are_gone_are_a_miss(quick, capsys):
    def change(tensors):
        del tensors["chunk5.start_frame"]
        tensors["chunk5.denoise.cond.video_out"] += 1

    _edit(quick / "dit_io.safetensors", change)
    status, lines, _ = _run(quick, capsys)
    assert status == 1 and any("chunk5" in line for line in _missed(lines))


def test_weights_in_a_narrow_type_and_files_around(quick, capsys):
    def narrow(tensors):
        for key, value in tensors.items():
            if torch.equal(value.half().float(), value.float()):
                tensors[key] = value.half()

    _edit(quick / "dit_weights.safetensors", narrow)
    for name in (".DS_Store", "README", "SHA256SUMS"):
        (quick / name).write_text("no recording")
    assert _run(quick, capsys)[0] == 0


def test_wrong_shape(quick, capsys):
    _edit(
        quick / "schedulers.safetensors", lambda t: t.__setitem__("unipc_c.x_after", t["unipc_c.x_after"][:3].clone())
    )
    status, lines, _ = _run(quick, capsys)
    assert status == 1 and any("unipc_c.x_after" in line for line in _missed(lines))


def test_unknown_file(quick, capsys):
    save_file({"x": torch.zeros(1)}, quick / "surprise.safetensors")
    status, lines, _ = _run(quick, capsys)
    (missed,) = _missed(lines)
    assert status == 1 and missed.startswith("surprise.safetensors") and "not compared" in missed


def test_unreadable_file(quick, capsys):
    path = quick / "dit_kv.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    status, lines, out = _run(quick, capsys)
    assert status == 1 and "SafetensorError" in out
    assert any(line.startswith("schedulers") and " ok" in line for line in lines)  # the others are still compared


def test_empty_and_absent_folders(tmp_path, capsys):
    assert main(["golden", str(tmp_path)]) == 1
    assert "nothing was compared" in capsys.readouterr().err
    assert main(["golden", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


# -- the measure ------------------------------------------------------------------------------------------------


def test_difference():
    b = torch.tensor([0.0, 2.0])
    assert difference(b.clone(), b) == 0.0
    assert difference(b + torch.tensor([0.0, 0.1]), b) == pytest.approx(0.1 / 2**0.5, rel=1e-5)
    assert difference(b[:1], b) == difference(b * float("nan"), b) == float("inf")
    assert difference(torch.ones(3), torch.zeros(3)) > 1e6  # a constant has no spread
    assert correlation(b, 3 * b + 1) == pytest.approx(1.0)


def test_rows_that_cannot_pass():
    assert Row("f", "w", 1, 1e-6, 1e-5).ok
    assert not Row("f", "w", 1, float("nan"), 1e-5).ok and not Row("f", "w", 0, 0.0, 1e-5).ok
    group = Group("f", "w", 0.08, min_correlation=0.999)
    group.compare("x", torch.tensor([1.0, 2, 3, 4.06]), torch.tensor([1.0, 2, 3, 4]))
    assert group.row().ok
    group.compare("y", torch.randn(100, generator=torch.Generator().manual_seed(0)) * 1e-9, torch.zeros(100) + 1e-9)
    assert not group.row().ok
    nan = Group("f", "w", 1.0)
    nan.compare("z", torch.zeros(2), torch.tensor([float("nan"), 1.0]))
    assert not nan.row().ok and nan.row().note == "z"
    assert "MISS" in table([nan.row()])


# -- other sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_no_size_is_assumed(tmp_path, size):
    maker = Maker(tmp_path / "g", size)
    maker.everything()
    messages: list[str] = []
    rows = compare_folder(tmp_path / "g", messages.append)
    text = table(rows) + "".join(m for m in messages if "Traceback" in m)
    assert rows and all(r.ok for r in rows), text
    by_name = {(r.file, r.what.split()[0]): r for r in rows}
    assert by_name["e2e_mask8.safetensors", "action"].tensors == 2 * len(SIZES[size]["plan"])
    assert by_name["e2e_mask8_trace.safetensors", "every"].tensors > 100
    assert by_name["e2e_full16.safetensors", "evaluated"].tensors == 6
    assert by_name["dit_kv.safetensors", "K/V"].tensors == 6
    assert {f"e2e_{v}.safetensors" for v in ("full16", "mask6", "mask5_decoupled")} <= {r.file for r in rows}
    # float32 against float64, not a comparison of a thing with itself.
    flows = by_name["dit_io.safetensors", "video"]
    assert 0 < flows.worst < 1e-5 and flows.tensors == 2 * (3 + 6)


def test_the_mistake_in_another_folder_is_seen(tmp_path):
    """Same layout, other sizes, one weight changed after the recording: the rows that depend on it miss."""
    maker = Maker(tmp_path / "g", "blocks of three")
    with torch.inference_mode():
        maker.dit()
    _edit(tmp_path / "g" / "dit_weights.safetensors", lambda t: t["blocks.0.self_attn.q.weight"].mul_(1.01))
    rows = compare_folder(tmp_path / "g")
    assert rows and not any(r.ok for r in rows)
