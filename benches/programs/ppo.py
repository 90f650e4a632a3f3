"""Proximal policy optimization with gymnasium's cart poles, in the manner of single-file implementations.

The rollout reads actions from the device at every step of the environments. After every epoch, Python reads
the divergence of the policy from the old one, and stops the updates early if it is too large.
"""

from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from _main import Step, main
from torch import nn
from torch.distributions import Categorical

STEPS = 20
COMPARABLE = 5

ENVS, ROLLOUT, EPOCHS, BATCHES = 4, 64, 4, 4
GAMMA, LAMBDA, CLIP, ENTROPY, TARGET_KL = 0.99, 0.95, 0.2, 0.01, 0.03


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            layer(observations, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, std=1.0)
        )
        self.actor = nn.Sequential(
            layer(observations, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, actions, std=0.01)
        )

    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return an action, its log probability, the policy's entropy, and the value of the state."""
        policy = Categorical(logits=self.actor(x))
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.critic(x).squeeze(-1)


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """An update on `device`: a rollout, followed by the epochs that learn from the rollout."""
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * ENVS)
    agent = Agent(envs.single_observation_space.shape[0], envs.single_action_space.n).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    act = compile(agent)
    observed = torch.from_numpy(envs.reset(seed=0)[0]).to(device)
    done = torch.zeros(ENVS, device=device)

    states = torch.zeros(ROLLOUT, ENVS, *envs.single_observation_space.shape, device=device)
    actions = torch.zeros(ROLLOUT, ENVS, dtype=torch.int64, device=device)
    log_probs, rewards, dones, values = torch.zeros(4, ROLLOUT, ENVS, device=device)

    @torch.no_grad()
    def play() -> None:
        nonlocal observed, done
        for t in range(ROLLOUT):
            states[t], dones[t] = observed, done
            actions[t], log_probs[t], _, values[t] = act(observed)
            state, reward, terminated, truncated, _ = envs.step(actions[t].cpu().numpy())
            rewards[t] = torch.tensor(reward, dtype=torch.float32, device=device)
            observed = torch.from_numpy(state).to(device)
            done = torch.from_numpy(np.logical_or(terminated, truncated)).float().to(device)

    @torch.no_grad()
    def advantages() -> torch.Tensor:
        """Generalized advantage estimation, backwards in time."""
        result, last = torch.zeros_like(rewards), torch.zeros(ENVS, device=device)
        following, goes_on = act(observed)[3], 1.0 - done
        for t in reversed(range(ROLLOUT)):
            delta = rewards[t] + GAMMA * following * goes_on - values[t]
            result[t] = last = delta + GAMMA * LAMBDA * goes_on * last
            following, goes_on = values[t], 1.0 - dones[t]
        return result

    def step() -> float:
        play()
        gains = advantages()
        returns = (gains + values).reshape(-1)
        old, gains, old_values = log_probs.reshape(-1), gains.reshape(-1), values.reshape(-1)
        flat_states, flat_actions = states.flatten(0, 1), actions.reshape(-1)
        order = np.arange(ENVS * ROLLOUT)
        for _ in range(EPOCHS):
            np.random.shuffle(order)
            for chosen in np.split(order, BATCHES):
                _, log_prob, entropy, value = act(flat_states[chosen], flat_actions[chosen])
                log_ratio = log_prob - old[chosen]
                ratio = log_ratio.exp()
                with torch.no_grad():
                    divergence = ((ratio - 1) - log_ratio).mean()
                gain = gains[chosen]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                clipped = old_values[chosen] + (value - old_values[chosen]).clamp(-CLIP, CLIP)
                errors = torch.max((value - returns[chosen]) ** 2, (clipped - returns[chosen]) ** 2)
                loss = policy_loss - ENTROPY * entropy.mean() + 0.25 * errors.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
            if divergence.item() > TARGET_KL:
                break
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
