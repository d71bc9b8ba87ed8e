"""The doctor tells right, missing and wrong apart, and never fails on what it looks at."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from loopscale.environment import doctor
from loopscale.environment.doctor import Finding

CPU_TORCH = {"version": "2.14.1", "cuda": None, "hip": None, "devices": [], "fault": None, "torchvision": "ok"}


@pytest.fixture
def probe(monkeypatch):
    """What running torch shows, replaced by a report that a test may change."""
    report = dict(CPU_TORCH)
    monkeypatch.setattr(doctor, "probe_torch", lambda: report)
    return report


@pytest.fixture
def apex_folder(tmp_path, monkeypatch):
    """A package named apex that fails when imported: looking must be enough."""
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('apex was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    importlib.invalidate_caches()
    return package


def named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def text_of(findings: list[Finding], **options) -> str:
    out = io.StringIO()
    doctor.render(findings, Console(file=out, **options))
    return out.getvalue()


def test_an_unrelated_apex_is_named_and_the_rest_still_examined(apex_folder, probe):
    assert doctor.apex_state() == "unrelated"
    findings = doctor.examine()
    apex = named(findings, "apex")
    assert apex.state == "wrong" and not apex.required
    assert "not NVIDIA's" in apex.note and "git clone https://github.com/NVIDIA/apex" in apex.note
    assert findings[-1].name == "disk"
    assert doctor.exit_code(findings) == 0


def test_nvidia_apex_is_known_by_its_content(apex_folder, monkeypatch):
    (apex_folder / "optimizers").mkdir()
    (apex_folder / "optimizers" / "__init__.py").touch()
    (apex_folder / "multi_tensor_apply.py").touch()
    importlib.invalidate_caches()
    assert doctor.apex_state() == "nvidia"
    assert not doctor.apex_has_kernels()
    (apex_folder.parent / "amp_C.py").touch()
    importlib.invalidate_caches()
    assert doctor.apex_has_kernels()


def test_apex_as_a_bare_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    assert doctor.apex_state() == "unrelated"


def test_no_apex(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.apex_state() == "absent"
    assert not doctor.apex_has_kernels()


def test_a_version_outside_its_cap_is_wrong_and_blocks(probe, monkeypatch):
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "2.0.1" if name == "huggingface-hub" else known(name))
    findings = doctor.examine()
    hub = named(findings, "huggingface-hub")
    assert hub.state == "wrong" and hub.found == "2.0.1"
    assert hub.note == "loopscale needs <1: pip install 'huggingface-hub<1'"
    assert doctor.exit_code(findings) == 1
    assert text_of(findings).endswith("not ready: put huggingface-hub right first\n")


def test_a_missing_tracker_does_not_block_but_a_missing_optimizer_does(probe, monkeypatch):
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "wandb" else known(name))
    findings = doctor.examine()
    assert named(findings, "wandb").state == "missing" and doctor.exit_code(findings) == 0
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "deepspeed" else known(name))
    assert doctor.exit_code(doctor.examine()) == 1


def test_a_misfit_among_the_other_packages_is_listed(probe, monkeypatch):
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "2.4.0" if name == "numpy" else known(name))
    other = named(doctor.examine(), "other packages")
    assert other.state == "wrong" and "'numpy<2.2' (is 2.4.0)" in other.note


def test_a_torchvision_of_another_torch(probe):
    probe["torchvision"] = "RuntimeError: operator torchvision::nms does not exist"
    finding = named(doctor.examine(), "torchvision")
    assert finding.state == "wrong" and finding.required and "torchvision::nms" in finding.note


def test_a_torch_that_cannot_be_imported(probe):
    probe.clear()
    probe["fault"] = "ImportError: libcudart.so.13: cannot open shared object file"
    findings = doctor.examine()
    assert named(findings, "torch").state == "wrong" and "libcudart" in named(findings, "torch").note
    assert doctor.exit_code(findings) == 1


def test_devices_are_counted_with_the_smallest_memory(probe):
    probe["cuda"] = "13.0"
    probe["devices"] = [{"name": "NVIDIA H100", "memory": 80 * doctor.GIB}] * 8
    assert named(doctor.examine(), "device").found == "8 × NVIDIA H100, 80 GiB"


def test_small_shared_memory_is_told_with_a_remedy(probe, monkeypatch):
    usage = shutil._ntuple_diskusage(64 * 2**20, 0, 64 * 2**20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)
    findings = doctor.examine()
    assert named(findings, "/dev/shm").state == "wrong" and "--shm-size" in named(findings, "/dev/shm").note
    assert named(findings, "disk").state == "wrong" and doctor.exit_code(findings) == 1


def test_piped_output_is_one_plain_line_a_finding(probe):
    findings = doctor.examine()
    plain = text_of(findings, width=80)
    assert "\x1b" not in plain and len(plain.splitlines()) == len(findings) + 1
    assert "\x1b" in text_of(findings, force_terminal=True, width=80, color_system="standard")


def test_json_holds_every_finding(probe):
    findings = doctor.examine()
    parsed = json.loads(doctor.as_json(findings))
    assert parsed["ready"] is True
    assert [Finding(**each) for each in parsed["findings"]] == findings


def test_torch_is_really_run():
    report = doctor.probe_torch()
    assert report["torchvision"] == "ok" and report["fault"] is None
    assert report["version"].startswith(doctor._version("torch"))


def test_a_silent_probe_is_a_finding_not_a_hang():
    assert "more than 0.01 s" in doctor.probe_torch(timeout=0.01)["fault"]


def test_container_limits_count(monkeypatch):
    limits = {"/sys/fs/cgroup/cpu.max": "150000 100000", "/sys/fs/cgroup/memory.max": str(2**20)}
    monkeypatch.setattr(doctor, "_read", lambda path: limits.get(path, ""))
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert doctor._cores() == 1.5
    assert doctor._memory() == 2**20


def test_disk_is_that_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctor._disk(Path.cwd()).note == str(tmp_path)
