"""The Python of a page runs, from top to bottom, in a process that holds what the page takes for granted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from aggregator import open_history
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
ENDED = "dist.destroy_process_group()"

# One process without a launcher, and what each framework wants of its reader.
ALONE = """
import os
os.environ.update(ACCELERATE_USE_CPU="true", WANDB_MODE="disabled")
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
examples = [(torch.randn(4), torch.randn(1)) for _ in range(12)]
loader = torch.utils.data.DataLoader(examples, batch_size=2)
loss_function = nn.functional.mse_loss
"""
FOR_TRANSFORMERS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": loss_function(self.layer(x), labels)}

model, dataset = Model(), [{"x": x, "labels": y} for x, y in examples]
"""
FOR_LIGHTNING = """
import lightning.pytorch as pl

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, index):
        return loss_function(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

module = Module()
"""

RECORDED = """
import telemetry

with telemetry.watch(model, optimizer=optimizer, to="runs/exp1", every=1, hist_every=2) as session:
    for step, batch in enumerate(loader):
        with session.step(step):
            train_one(batch)
print(session.report)
"""


def run_page(page, given, ended, folder):
    """Run the Python of a page after ``given``; return what it printed."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    (folder / "page.py").write_text("\n".join([given, *blocks, ended]))
    done = subprocess.run([sys.executable, "page.py"], cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("page", "given"),
    [
        ("README.md", GIVEN + INITIALISED),
        ("docs/how-to/attach-to-a-torchrun-job.md", GIVEN),
        ("docs/how-to/write-your-own-check.md", GIVEN + INITIALISED),
        ("docs/how-to/observe-a-call-site.md", GIVEN + INITIALISED),
        ("docs/how-to/read-the-report.md", GIVEN + INITIALISED + RECORDED),
    ],
)
def test_the_python_of_the_page_runs(page, given, tmp_path):
    assert "3 steps" in run_page(page, given, ENDED, tmp_path)
    assert (tmp_path / "runs/exp1").is_dir()


@pytest.mark.parametrize(
    ("page", "given", "record"),
    [
        ("hugging-face-trainer", ALONE + FOR_TRANSFORMERS, "runs/exp1/rankfold"),
        ("lightning", ALONE + FOR_LIGHTNING, "runs/exp1/record"),
        ("accelerate", ALONE, "runs/exp1"),
    ],
)
def test_the_page_of_a_framework_records_optimizer_steps_with_their_micro_batches(page, given, record, tmp_path):
    assert "3 steps" in run_page(f"docs/how-to/{page}.md", given, "", tmp_path)
    steps = open_history(tmp_path / record).steps().to_pylist()
    assert {row["num_micro_batches"] for row in steps} == {2}
    assert {row["num_applied"] for row in steps} == {1}
