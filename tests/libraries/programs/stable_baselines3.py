"""Trains agents on small environments of Gymnasium with PPO, A2C, DQN, SAC and TD3."""

# /// script
# dependencies = ["stable-baselines3==2.9.2", "gymnasium==1.4.0"]
# ///

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecNormalize


class Chase(gym.Env):
    """A point that should be moved to the origin; observations are images or positions."""

    def __init__(self, continuous=False, image=False):
        self.image = image
        self.observation_space = (
            spaces.Box(0, 255, (1, 36, 36), np.uint8) if image else spaces.Box(-2, 2, (2,), np.float32)
        )
        self.action_space = spaces.Box(-1, 1, (2,), np.float32) if continuous else spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.time = 0
        return self._observe(), {}

    def step(self, action):
        moves = np.array([[0.2, 0], [-0.2, 0], [0, 0.2], [0, -0.2]], np.float32)
        self.position += (
            moves[action] if isinstance(self.action_space, spaces.Discrete) else 0.2 * np.asarray(action)
        )
        self.position = self.position.clip(-2, 2)
        self.time += 1
        return self._observe(), -float(np.linalg.norm(self.position)), False, self.time >= 20, {}

    def _observe(self):
        if not self.image:
            return self.position.copy()
        picture = np.zeros((1, 36, 36), np.uint8)
        row, column = ((self.position + 2) * 8.5).astype(int)
        picture[0, row : row + 3, column : column + 3] = 255
        return picture


discrete = make_vec_env(Chase, n_envs=2, seed=0)
continuous = make_vec_env(Chase, n_envs=1, seed=0, env_kwargs={"continuous": True})
noise = NormalActionNoise(np.zeros(2), 0.1 * np.ones(2))

agents = {
    "ppo": PPO(
        "MlpPolicy",
        VecNormalize(discrete),
        n_steps=64,
        batch_size=32,
        n_epochs=4,
        ent_coef=0.01,
        policy_kwargs={"net_arch": [32, 32]},
        seed=0,
    ),
    "a2c": A2C(
        "MlpPolicy", discrete, n_steps=8, use_rms_prop=True, policy_kwargs={"net_arch": [32, 32]}, seed=0
    ),
    "dqn": DQN(
        "MlpPolicy",
        discrete,
        learning_starts=50,
        buffer_size=500,
        train_freq=4,
        batch_size=32,
        policy_kwargs={"net_arch": [32, 32]},
        seed=0,
    ),
    "sac": SAC(
        "MlpPolicy",
        continuous,
        learning_starts=40,
        batch_size=32,
        ent_coef="auto",
        policy_kwargs={"net_arch": [32, 32]},
        seed=0,
    ),
    "td3": TD3(
        "MlpPolicy",
        continuous,
        learning_starts=40,
        batch_size=32,
        action_noise=noise,
        policy_kwargs={"net_arch": [32, 32]},
        seed=0,
    ),
}
steps = {"ppo": 512, "a2c": 480, "dqn": 300, "sac": 120, "td3": 120}

for name, agent in agents.items():
    agent.learn(steps[name])
    reward, deviation = evaluate_policy(agent, agent.get_env(), n_eval_episodes=4, warn=False)
    print(name, float(reward), float(deviation))
    print(name, sum(p.abs().sum() for p in agent.policy.parameters()).item())

images = make_vec_env(Chase, n_envs=1, seed=0, env_kwargs={"image": True})
agent = PPO(
    "CnnPolicy", images, n_steps=32, batch_size=16, n_epochs=1, seed=0, policy_kwargs={"net_arch": [16]}
)
agent.learn(64)
action, _ = agent.predict(images.reset(), deterministic=True)
print("images", action.tolist(), sum(p.abs().sum() for p in agent.policy.parameters()).item())
