"""The Python of a page runs, from top to bottom, in a process that holds what the page takes for granted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.demo_job import SCRIPT

ROOT = Path(__file__).resolve().parents[2]

# A job of one rank, as torchrun would start it, with the model, optimizer and loader of the reader.
GIVEN = f"""
import os, sys
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
sys.path.insert(0, {str(SCRIPT.parent)!r})
import torch
import torch.distributed as dist
from demo_model import ByteGPT, GPTConfig

model = parallel = ByteGPT(GPTConfig(width=16, context=8))
optimizer = torch.optim.AdamW(model.parameters())
loader = [(torch.randint(256, (2, 8)), torch.randint(256, (2, 8))) for _ in range(3)]

def loss_function(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

def train_one(batch):
    optimizer.zero_grad()
    loss_function(model(batch[0]), batch[1]).backward()
    optimizer.step()
"""
INITIALISED = 'dist.init_process_group("gloo")\n'


@pytest.mark.parametrize(
    ("page", "given"),
    [
        ("README.md", GIVEN + INITIALISED),
        ("docs/how-to/attach-to-a-torchrun-job.md", GIVEN),
        ("docs/how-to/write-your-own-check.md", GIVEN + INITIALISED),
        ("docs/how-to/observe-a-call-site.md", GIVEN + INITIALISED),
    ],
)
def test_the_python_of_the_page_runs(page, given, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    (tmp_path / "page.py").write_text("\n".join([given, *blocks, "dist.destroy_process_group()"]))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "3 steps" in done.stdout
    assert (tmp_path / "runs/exp1").is_dir()
