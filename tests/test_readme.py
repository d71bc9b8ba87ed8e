"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.launch import launch

ROOT = Path(__file__).parents[1]


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.ranks
def test_the_injection_of_the_readme_is_one_file_and_one_line(tmp_path):
    """Both blocks are put into a copy of the package; a model with it gets a gradient on its one parameter."""
    shutil.copytree(ROOT / "loopscale", tmp_path / "loopscale", ignore=shutil.ignore_patterns("__pycache__"))
    file = next(b for b in blocks() if "class GatedInjection" in b)
    line = next(b for b in blocks() if '"gated":' in b).splitlines()[1]
    (tmp_path / re.search(r"# (loopscale/\S+)", file)[1]).write_text(file)
    registry = tmp_path / "loopscale" / "config" / "registry.py"
    registry.write_text(registry.read_text().replace("INJECTIONS = {\n", f"INJECTIONS = {{\n{line}\n"))
    script = (
        f"""
import sys
for name in [n for n in sys.modules if n.partition(".")[0] == "loopscale"]:
    del sys.modules[name]  # the server of processes has imported the package itself
sys.path.insert(0, {str(tmp_path)!r})
"""
        + """
import torch
from loopscale.config.tree import ModelConfig, ParallelConfig
from loopscale.parallel import mesh
mesh.start(ParallelConfig())
from loopscale.model.inputs import Documents, Inputs
from loopscale.model.stage import LoopedStage
from loopscale.objective.supervision import Exit
from loopscale.parallel.ring.execute import Task, execute
from loopscale.parallel.ring.links import Links
from loopscale.parallel.ring.plan import plan
stage = LoopedStage(ModelConfig(vocab_size=20, hidden_size=16, heads=2, ffn_size=8, inject="gated"), 8, seed=1)
tokens = torch.arange(16).view(2, 8)
inputs = Inputs(tokens, tokens, Documents.whole(2, 8, torch.device("cpu")), torch.arange(2))
task = Task(inputs, 3, 3, (Exit(3, (3,)),))
execute(plan(1, [task.work], in_flight=1), stage, [task], Links.alone())
gate = dict(stage.named_parameters())["injection.gate"]
print("GRADIENT", float(gate.grad.norm()) > 0, [w.name for h, _ in stage.held() for w in h.weights if "inject" in w.name])
"""
    )
    printed, _ = launch([sys.executable, "-c", script], tmp_path / "printed.txt").communicate(120)
    assert printed.strip().endswith("GRADIENT True ['inject.gate']"), printed


def test_every_preset_that_the_readme_names_is_there():
    text = (ROOT / "README.md").read_text()
    for name in ("blindspot-44m", "fixedpoint-s", "huginn-3.5b", "parcae-140m", "ouro-1.4b"):
        assert f"`{name}`" in text
        assert (ROOT / "configs" / "presets" / f"{name}.yaml").exists()


def test_the_files_that_the_readme_runs_exist():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(configs/\S+?\.yaml)", text)) - {"configs/run/toy-*.yaml"}
    assert named
    assert all((ROOT / path).exists() for path in named)
