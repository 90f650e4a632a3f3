"""Processes that a script under `tandem run` spawns. "cuda" means Tandem in them too."""

import forked
import pytest

SCRIPT = """
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

import sys
if sys.argv[1] == "spawn":  # a new process imports the script
    torch.ones(2, device="cuda").sum().item()

def work(rank, depth):
    print("work", depth, torch.ones(6, device="cuda").sum().item(), torch.cuda.is_available(), flush=True)
    print("compiled", torch.compile(lambda x: x + 1)(torch.ones(1, device="cuda")).item(), flush=True)
    if depth:
        mp.spawn(work, (depth - 1,), nprocs=1)

def collate(items):
    return torch.tensor(items).to("cuda")

if __name__ == "__main__":
    mp.spawn(work, (1,), nprocs=1)
    loader = DataLoader(
        [1.0, 2.0, 3.0], 3, num_workers=1, collate_fn=collate, multiprocessing_context=sys.argv[1]
    )
    for batch in loader:
        print("batch", batch.device.type, batch.sum().item())
"""


def run(script, start, *options):
    return forked.run(["-m", "torch_tandem", "run", "--quiet", *options, script, start])


def printed_as_in_eager(script, start, *options):
    """Returns what a script prints, which must be the same without Tandem."""
    eager = forked.run([script, start])
    done = run(script, start, *options)
    assert eager.returncode == done.returncode == 0, done.stderr
    assert done.stdout == eager.stdout
    return done.stdout


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_cuda_means_tandem_in_spawned_processes(tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run(script, start)
    assert done.returncode == 0, done.stderr
    expected = [
        "work 1 6.0 True",
        "compiled 2.0",
        "work 0 6.0 True",
        "compiled 2.0",
        "batch tandem 6.0",
    ]
    assert done.stdout.splitlines() == expected


def test_without_the_alias_nothing_is_installed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "def work():\n    print('torch_tandem' in sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    process.start()\n    process.join()\n"
    )
    assert run(script, "spawn", "--no-cuda").stdout.split() == ["False"]


SHARED = """
import sys
import torch
import torch.multiprocessing as mp

def child(model, counter):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(i))).square().sum().backward()
        optimizer.step()
        counter.add_(1)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    counter = torch.zeros(1).share_memory_()
    model.share_memory()
    for _ in range(2):
        process = mp.get_context(sys.argv[1]).Process(target=child, args=(model, counter))
        process.start()
        process.join(120)
        assert process.exitcode == 0, process.exitcode
    # The parent trains on, with what its children have learned.
    child(model, counter)
    print(counter.item(), [p.tolist() for p in model.parameters()])
"""


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_shared_parameters_of_an_adopted_script_are_shared(tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(SHARED)
    assert printed_as_in_eager(script, start, "--adopt=always").startswith("9.0 ")


def test_an_adopted_tensor_with_views_is_not_shared_without_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch\nx = torch.zeros(4)\nviews = x[:2], x[2:]\nviews[0].share_memory_()")
    done = run(script, "", "--adopt=always")
    assert done.returncode == 1 and "before views of it are made" in done.stderr


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_shared_parameters_on_cuda_are_shared(tmp_path, start):
    script = tmp_path / "script.py"
    place = "'cuda' if torch.cuda.is_available() else 'cpu'"
    text = SHARED.replace("Linear(4, 1))\n", f"Linear(4, 1)).to({place})\n")
    text = text.replace("float(i))", f"float(i)).to({place})")
    assert text.count("cuda'") == 2
    script.write_text(text)
    assert printed_as_in_eager(script, start, "--adopt=never").startswith("9.0 ")


POOL = """
import sys
import torch
import torch.multiprocessing as mp

def work(tensors):
    weight, bias = tensors
    return (weight * 2 + bias).detach(), weight.requires_grad, type(weight).__name__

if __name__ == "__main__":
    weight = torch.nn.Parameter(torch.ones(2))
    print((weight * 2).sum().item())
    tasks = [(weight, torch.ones(2)), (weight, torch.zeros(2))]
    with mp.get_context(sys.argv[1]).Pool(2) as pool:
        for result, *kind in pool.map_async(work, tasks).get(100):
            print(result.tolist(), kind)
"""


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_pools_get_the_tensors_of_an_adopted_script(tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(POOL)
    assert printed_as_in_eager(script, start, "--adopt=always")


A3C = """
import random
import sys
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 16)
        self.actor, self.critic = nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, state):
        hidden = torch.tanh(self.body(state))
        return self.actor(hidden), self.critic(hidden)

class SharedAdam(torch.optim.Adam):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": torch.zeros(()).share_memory_(),
                    "exp_avg": torch.zeros_like(p).share_memory_(),
                    "exp_avg_sq": torch.zeros_like(p).share_memory_(),
                }

class Corridor:
    def __init__(self, rng):
        self.rng, self.at, self.goal = rng, 0.0, 1.0

    def reset(self):
        self.at, self.goal = self.rng.uniform(-1, 1), self.rng.choice([-1.0, 1.0])
        return torch.tensor([self.at, self.goal])

    def step(self, action):
        self.at += 0.2 if action else -0.2
        return torch.tensor([self.at, self.goal]), -abs(self.at - self.goal)

def worker(rank, shared, optimizer, episodes):
    torch.manual_seed(rank)
    env, local = Corridor(random.Random(rank)), ActorCritic()
    for _ in range(4):
        local.load_state_dict(shared.state_dict())
        state, logs, values, rewards, entropy = env.reset(), [], [], [], 0.0
        for _ in range(5):
            logits, value = local(state)
            policy = torch.distributions.Categorical(logits=logits)
            action = policy.sample()
            logs.append(policy.log_prob(action))
            entropy = entropy + policy.entropy()
            values.append(value[0])
            state, reward = env.step(action.item())
            rewards.append(reward)
        returns, total = [], local(state)[1].item()
        for reward in reversed(rewards):
            total = reward + 0.9 * total
            returns.insert(0, total)
        returns = torch.tensor(returns)
        advantage = returns - torch.stack(values)
        loss = -(torch.stack(logs) * advantage.detach()).sum() + advantage.square().sum() - 0.01 * entropy
        local.zero_grad()
        loss.backward()
        for mine, theirs in zip(local.parameters(), shared.parameters()):
            theirs._grad = mine.grad
        optimizer.step()
        with episodes.get_lock():
            episodes.value += 1

if __name__ == "__main__":
    torch.manual_seed(0)
    shared = ActorCritic()
    shared.share_memory()
    before = [p.clone() for p in shared.parameters()]
    optimizer, episodes = SharedAdam(shared.parameters(), 1e-2), mp.get_context(sys.argv[1]).Value("i", 0)
    for rank in range(2):
        process = mp.get_context(sys.argv[1]).Process(target=worker, args=(rank, shared, optimizer, episodes))
        process.start()
        process.join(120)
        assert process.exitcode == 0, process.exitcode
    moved = [(p - q).abs().sum().item() for p, q in zip(shared.parameters(), before)]
    assert all(moved), moved
    print(episodes.value, [p.tolist() for p in shared.parameters()])
"""


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_workers_of_a3c_train_their_parents_model(tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(A3C)
    eager = forked.run([script, start])
    done = run(script, start)
    assert eager.returncode == done.returncode == 0, (eager.stderr, done.stderr)
    assert eager.stdout.startswith("8 ") and done.stdout == eager.stdout
