"""A script for several GPUs, as they are written for CUDA."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(rank)
model = DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
sampler = DistributedSampler(data)
folder, state = sys.argv[1], {"model": model.module.state_dict(), "epoch": 0}
if os.path.exists(folder):
    checkpoint.load(state, checkpoint_id=folder)
for epoch in range(state["epoch"], 4):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to(rank)), y.to(rank))
        loss.backward()
        optimizer.step()
    dist.barrier(device_ids=[rank])
    state = {"model": model.module.state_dict(), "epoch": epoch + 1}
    checkpoint.save(state, checkpoint_id=folder)
    if (
        epoch == 1
        and rank == 1
        and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        and "fails" in sys.argv
    ):
        raise SystemExit("this rank fails once")
total = loss.detach().clone()
dist.all_reduce(total, op=dist.ReduceOp.AVG)
print(f"rank {rank}: {total.item():.6f}", flush=True)
dist.destroy_process_group()
