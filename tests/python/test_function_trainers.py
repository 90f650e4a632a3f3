"""Models as functions in trainers of libraries. Unchanged scripts have the same bits."""

import json

import forked
import pytest

HEAD = """
import json, os, tempfile
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
        self.layers = nn.Sequential(*[layer for block in blocks for layer in block], nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x)

generator = torch.Generator().manual_seed(1)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(
    torch.randn(1600, 16, generator=generator), torch.randint(0, 4, (1600,), generator=generator)
)
losses = []
"""

SCRIPTS = {
    "transformers": """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64,
)
model = LlamaForCausalLM(config)
rows = [torch.randint(0, 64, (12,), generator=generator) for _ in range(256)]
rows = [{"input_ids": row, "labels": row} for row in rows]
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        folder, max_steps=200, per_device_train_batch_size=8, logging_steps=1, report_to=[],
        disable_tqdm=True, save_strategy="no", optim="adamw_torch_fused",
    )
    trainer = Trainer(model, options, train_dataset=rows, data_collator=default_data_collator)
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
""",
    "lightning": """
import lightning.pytorch

class Module(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        model = Net()
        self.model = model

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)

module = Module()
trainer = lightning.pytorch.Trainer(
    max_steps=200, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(data, 8))
model = module.model
""",
    "accelerate": """
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
loader = torch.utils.data.DataLoader(data, 8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
""",
}

TAIL = """
weights = sum(w.double().sum() for w in model.state_dict().values())
print("result", [float(loss).hex() for loss in losses], float(weights).hex())
"""


@pytest.mark.parametrize("library", SCRIPTS)
def test_an_unchanged_script(tmp_path, library):
    pytest.importorskip(library, reason="an optional library is not installed")
    (tmp_path / "train.py").write_text(HEAD + SCRIPTS[library] + TAIL)

    def run(*options):
        ran = forked.run(["-m", "torch_tandem", "run", "--quiet", *options, "train.py"], cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        return next(line for line in ran.stdout.splitlines() if line.startswith("result"))

    assert run() == run("--function", "model", "--report-json", "report.json")
    [function] = json.loads((tmp_path / "report.json").read_text())["functions"]
    assert function["replayed"] >= 180 and function["audits"] >= 3 and not function["failed"], function
