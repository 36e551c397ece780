"""The demo's model and text, and what a worker may import."""

import ast
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from launch.demo_job import SCRIPT


@pytest.fixture
def demo(monkeypatch):
    """Import the demo's modules as its script does, by bare name from its folder."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import demo_model
    import demo_text

    yield demo_model, demo_text
    for name in ("demo_model", "demo_text"):
        del sys.modules[name]


def imported_packages(script: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_no_worker_imports_launch_and_of_aggregator_only_the_sinks_and_under_ray_the_callback():
    ours = {
        script.stem: {
            name
            for name in imported_packages(script)
            if name.partition(".")[0] in ("telemetry", "aggregator", "launch")
        }
        for script in SCRIPT.parent.glob("*.py")
    }
    assert ours.pop("train_ray") <= {"telemetry", "aggregator.sinks", "aggregator.ray_actor.train"}
    assert set().union(*ours.values()) == {"telemetry", "aggregator.sinks"}


def test_the_demos_files_shadow_no_module_of_the_standard_library():
    names = {script.stem for script in SCRIPT.parent.glob("*.py")}
    assert not names & (sys.stdlib_module_names | {"telemetry", "aggregator", "launch"})


def test_the_head_is_tied_to_the_embedding_and_a_byte_sees_no_later_one(demo):
    model_module, _ = demo
    model = model_module.ByteGPT(model_module.GPTConfig(context=16)).eval()
    assert model.head.weight is model.embed.weight
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10:] = 200
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, :10], model(changed)[:, :10])
        assert not torch.equal(model(tokens)[:, 10:], model(changed)[:, 10:])


def test_the_text_is_the_standard_library(demo):
    _, text_module = demo
    text = bytes(text_module.standard_library_text().numpy())
    assert Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes() in text


def test_batches_repeat_for_a_seed_differ_by_rank_and_are_one_byte_apart(demo):
    _, text_module = demo
    text = torch.arange(200, dtype=torch.uint8)

    def draw(rank):
        return text_module.ByteBatches(text, batch_size=4, context=8, seed=3, rank=rank).draw()

    inputs, targets = draw(0)
    assert inputs.shape == targets.shape == (4, 8)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, draw(0)[0])
    assert not torch.equal(inputs, draw(1)[0])
