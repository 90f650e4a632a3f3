"""Trains PPO with collectors and advantages, and DQN with a prioritized replay buffer, on CartPole."""

# /// script
# dependencies = ["torchrl==0.14.1", "tensordict==0.14.3", "gymnasium==1.4.0"]
# ///

import os

os.environ["RL_LOGGING_LEVEL"] = "WARNING"

import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import EGreedyModule, ProbabilisticActor, QValueActor, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss, SoftUpdate
from torchrl.objectives.value import GAE

np.random.seed(0)
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def environment():
    env = TransformedEnv(GymEnv("CartPole-v1", device=device, categorical_action_encoding=True), RewardSum())
    env.append_transform(StepCounter(max_steps=100))
    env.set_seed(0)
    return env


def network(outputs):
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, outputs)).to(device)


env = environment()
actor = ProbabilisticActor(
    TensorDictModule(network(2), in_keys=["observation"], out_keys=["logits"]),
    in_keys=["logits"],
    distribution_class=Categorical,
    return_log_prob=True,
    spec=env.action_spec,
)
critic = ValueOperator(network(1), in_keys=["observation"])
advantage = GAE(gamma=0.98, lmbda=0.95, value_network=critic, average_gae=True, device=device)
loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.5)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=3e-3)
collector = Collector(env, actor, frames_per_batch=128, total_frames=640, device=device)
buffer = ReplayBuffer(
    storage=LazyTensorStorage(128, device=device), sampler=SamplerWithoutReplacement(), batch_size=64
)
for iteration, data in enumerate(collector):
    for _ in range(2):
        advantage(data)
        buffer.extend(data.reshape(-1))
        for _ in range(2):
            losses = loss_module(buffer.sample())
            loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            optimizer.step()
    print("ppo", iteration, loss.item(), "reward", data["next", "episode_reward"].max().item())
collector.shutdown()

env = environment()
value = QValueActor(network(2), in_keys=["observation"], spec=env.action_spec).to(device)
explore = EGreedyModule(env.action_spec, annealing_num_steps=300, eps_end=0.05)
policy = TensorDictSequential(value, explore.to(device))
dqn = DQNLoss(value, loss_function="l2", delay_value=True, double_dqn=True, action_space=env.action_spec)
dqn.make_value_estimator(gamma=0.97)
target = SoftUpdate(dqn, tau=0.05)
optimizer = torch.optim.Adam(dqn.parameters(), lr=3e-3)
replay = TensorDictReplayBuffer(
    storage=LazyTensorStorage(500), sampler=PrioritizedSampler(500, 0.7, 0.5), batch_size=32
)
collector = Collector(
    env, policy, frames_per_batch=20, total_frames=300, init_random_frames=60, device=device
)
for iteration, data in enumerate(collector):
    replay.extend(data.reshape(-1))
    explore.step(data.numel())
    if iteration < 3:
        continue
    for _ in range(3):
        sample = replay.sample().to(device)
        loss = dqn(sample)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        target.step()
        replay.update_tensordict_priority(sample)
    if iteration % 3 == 0:
        print("dqn", iteration, loss.item())
collector.shutdown()

with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
    rollout = env.rollout(50, value)
print(
    "rollout",
    rollout.shape[0],
    rollout["next", "reward"].sum().item(),
    rollout["observation"].abs().sum().item(),
)
