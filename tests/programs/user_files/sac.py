"""Soft actor-critic: twin critics, a learned temperature, three optimizers."""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn, optim

LOG_STD_MIN, LOG_STD_MAX = -5, 2


class SoftQNetwork(nn.Module):
    def __init__(self, obs_dim, act_dim, width=1024):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(obs_dim + act_dim, width), nn.Linear(width, width)
        self.fc3 = nn.Linear(width, 1)

    def forward(self, x, a):
        x = F.relu(self.fc1(torch.cat([x, a], 1)))
        return self.fc3(F.relu(self.fc2(x)))


class Actor(nn.Module):
    def __init__(self, obs_dim, act_dim, width=1024):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(obs_dim, width), nn.Linear(width, width)
        self.fc_mean, self.fc_logstd = nn.Linear(width, act_dim), nn.Linear(width, act_dim)

    def get_action(self, x):
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        mean = self.fc_mean(x)
        log_std = torch.tanh(self.fc_logstd(x))
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)
        normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(1 - y_t.pow(2) + 1e-6)
        return y_t, log_prob.sum(1, keepdim=True)


class SAC:
    def __init__(self, obs_dim=376, act_dim=17, gamma=0.99, tau=0.005):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.gamma, self.tau = gamma, tau
        self.actor = Actor(obs_dim, act_dim).to(self.device)
        self.qf1 = SoftQNetwork(obs_dim, act_dim).to(self.device)
        self.qf2 = SoftQNetwork(obs_dim, act_dim).to(self.device)
        self.qf1_target, self.qf2_target = copy.deepcopy(self.qf1), copy.deepcopy(self.qf2)
        self.q_optimizer = optim.Adam([*self.qf1.parameters(), *self.qf2.parameters()], lr=1e-3)
        self.actor_optimizer = optim.Adam(self.actor.parameters(), lr=3e-4)
        self.target_entropy = -float(act_dim)
        self.log_alpha = torch.zeros(1, requires_grad=True, device=self.device)
        self.alpha = self.log_alpha.exp().item()
        self.a_optimizer = optim.Adam([self.log_alpha], lr=1e-3)

    def step(self, batch):
        obs, actions, rewards, next_obs, dones = (
            batch[k].to(self.device) for k in ("obs", "actions", "rewards", "next_obs", "dones")
        )
        with torch.no_grad():
            next_actions, next_log_pi = self.actor.get_action(next_obs)
            q1_next, q2_next = (
                self.qf1_target(next_obs, next_actions),
                self.qf2_target(next_obs, next_actions),
            )
            min_next = torch.min(q1_next, q2_next) - self.alpha * next_log_pi
            next_q_value = rewards.flatten() + (1 - dones.flatten()) * self.gamma * min_next.view(-1)
        qf_loss = F.mse_loss(self.qf1(obs, actions).view(-1), next_q_value)
        qf_loss = qf_loss + F.mse_loss(self.qf2(obs, actions).view(-1), next_q_value)
        self.q_optimizer.zero_grad()
        qf_loss.backward()
        self.q_optimizer.step()

        pi, log_pi = self.actor.get_action(obs)
        min_qf_pi = torch.min(self.qf1(obs, pi), self.qf2(obs, pi))
        actor_loss = ((self.alpha * log_pi) - min_qf_pi).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()

        with torch.no_grad():
            _, log_pi = self.actor.get_action(obs)
        alpha_loss = (-self.log_alpha.exp() * (log_pi + self.target_entropy)).mean()
        self.a_optimizer.zero_grad()
        alpha_loss.backward()
        self.a_optimizer.step()
        self.alpha = self.log_alpha.exp().item()

        for source, target in ((self.qf1, self.qf1_target), (self.qf2, self.qf2_target)):
            for param, target_param in zip(source.parameters(), target.parameters(), strict=True):
                target_param.data.copy_(self.tau * param.data + (1 - self.tau) * target_param.data)
        return qf_loss.item(), actor_loss.item(), alpha_loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    n, agent = args.batch_size, SAC()
    for _ in range(args.steps):
        batch = {"obs": torch.randn(n, 376), "actions": torch.rand(n, 17) * 2 - 1, "rewards": torch.randn(n)}
        batch |= {"next_obs": torch.randn(n, 376), "dones": torch.zeros(n)}
        print(agent.step(batch))
