"""Trains a policy by REINFORCE with a baseline on CartPole, in vectorized environments with wrappers."""

# /// script
# dependencies = ["gymnasium==1.4.0"]
# ///

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from gymnasium.wrappers.vector import NormalizeObservation
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
ENVIRONMENTS, HORIZON = 8, 30


def create():
    return RecordEpisodeStatistics(TimeLimit(gym.make("CartPole-v1"), 100))


environments = NormalizeObservation(gym.vector.SyncVectorEnv([create] * ENVIRONMENTS))
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=1e-2)

observation, _ = environments.reset(seed=0)
for iteration in range(60):
    log_probs, values, rewards, continues, entropies, lengths = [], [], [], [], [], []
    for _ in range(HORIZON if iteration % 10 else 15):
        state = torch.as_tensor(observation, dtype=torch.float32)
        distribution = Categorical(logits=policy(state))
        action = distribution.sample()
        log_probs.append(distribution.log_prob(action))
        entropies.append(distribution.entropy())
        values.append(critic(state).squeeze(1))
        observation, reward, terminated, truncated, info = environments.step(action.numpy())
        rewards.append(torch.as_tensor(reward, dtype=torch.float32))
        continues.append(torch.as_tensor(~(terminated | truncated), dtype=torch.float32))
        if "episode" in info:
            lengths += info["episode"]["l"][info["_episode"]].tolist()

    running, returns = values[-1].detach(), []
    for reward, proceed in zip(reversed(rewards), reversed(continues), strict=True):
        running = reward + 0.97 * proceed * running
        returns.insert(0, running)
    returns, values = torch.stack(returns), torch.stack(values)
    advantage = returns - values.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    gain = (torch.stack(log_probs) * advantage).mean() + 0.01 * torch.stack(entropies).mean()
    loss = (values - returns).square().mean() * 0.5 - gain
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    optimizer.step()
    if iteration % 6 == 5:
        print("iteration", iteration, loss.item(), "length", float(np.mean(lengths)) if lengths else 0.0)
environments.close()
