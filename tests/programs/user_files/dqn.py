"""DQN with a target network and a replay memory."""

import argparse
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class DQN(nn.Module):
    def __init__(self, n_actions):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 32, 8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3)
        self.fc1 = nn.Linear(64 * 7 * 7, 512)
        self.fc2 = nn.Linear(512, n_actions)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


class Learner:
    def __init__(self, n_actions=18, gamma=0.99, target_update=1000):
        self.gamma, self.target_update, self.updates = gamma, target_update, 0
        self.policy_net = DQN(n_actions).to(device)
        self.target_net = DQN(n_actions).to(device)
        self.target_net.load_state_dict(self.policy_net.state_dict())
        self.target_net.eval()
        self.optimizer = torch.optim.RMSprop(
            self.policy_net.parameters(), lr=2.5e-4, alpha=0.95, eps=0.01, centered=True
        )
        self.losses = deque(maxlen=100)

    def step(self, state, action, reward, next_state, done):
        state = state.to(device, torch.float32) / 255
        next_state = next_state.to(device, torch.float32) / 255
        action, reward, done = action.to(device), reward.to(device), done.to(device)
        q = self.policy_net(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = self.target_net(next_state).max(1)[0]
        expected = reward + self.gamma * next_q * (1 - done.float())
        loss = F.smooth_l1_loss(q, expected)
        self.optimizer.zero_grad()
        loss.backward()
        for p in self.policy_net.parameters():
            p.grad.data.clamp_(-1, 1)
        self.optimizer.step()
        if self.updates % self.target_update == 0:
            self.target_net.load_state_dict(self.policy_net.state_dict())
        self.updates += 1
        self.losses.append(loss.item())


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *transition):
        self.memory.append(transition)

    def sample(self, n):
        return [torch.stack(part) for part in zip(*random.choices(self.memory, k=n), strict=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    memory = ReplayMemory(10_000)
    for _ in range(200):
        state, next_state = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
        memory.push(
            state, torch.tensor(random.randrange(18)), torch.rand(()), next_state, torch.tensor(False)
        )
    learner = Learner()
    for _ in range(args.steps):
        learner.step(*memory.sample(args.batch_size))
    print(sum(learner.losses) / len(learner.losses))
