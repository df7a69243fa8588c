"""PPO on stacked frames: several epochs of minibatches for each rollout."""

import argparse

import torch
import torch.nn as nn
from torch.distributions.categorical import Categorical


def layer_init(layer, std=2**0.5, bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, n_actions=6):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, n_actions), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def get_action_and_value(self, x, action):
        hidden = self.network(x / 255.0)
        probs = Categorical(logits=self.actor(hidden), validate_args=False)
        return probs.log_prob(action), probs.entropy(), self.critic(hidden)


class PPO:
    clip_coef, ent_coef, vf_coef, max_grad_norm = 0.1, 0.01, 0.5, 0.5
    update_epochs, num_minibatches, target_kl = 4, 4, 0.02

    def __init__(self):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.agent = Agent().to(self.device)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=2.5e-4, eps=1e-5)

    def step(self, obs, actions, logprobs, advantages, returns):
        obs, actions = obs.to(self.device).float(), actions.to(self.device)
        logprobs, advantages, returns = (t.to(self.device) for t in (logprobs, advantages, returns))
        batch_size = obs.shape[0]
        minibatch_size = batch_size // self.num_minibatches
        for _ in range(self.update_epochs):
            b_inds = torch.randperm(batch_size, device=self.device)
            for start in range(0, batch_size, minibatch_size):
                mb_inds = b_inds[start : start + minibatch_size]
                newlogprob, entropy, newvalue = self.agent.get_action_and_value(
                    obs[mb_inds], actions[mb_inds]
                )
                logratio = newlogprob - logprobs[mb_inds]
                ratio = logratio.exp()
                with torch.no_grad():
                    approx_kl = ((ratio - 1) - logratio).mean()
                mb_advantages = advantages[mb_inds]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - self.clip_coef, 1 + self.clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()
                v_loss = 0.5 * ((newvalue.view(-1) - returns[mb_inds]) ** 2).mean()
                loss = pg_loss - self.ent_coef * entropy.mean() + v_loss * self.vf_coef
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), self.max_grad_norm)
                self.optimizer.step()
            if self.target_kl is not None and approx_kl.item() > self.target_kl:
                break
        return v_loss.item(), pg_loss.item(), approx_kl.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=1024, help="steps of all environments in a rollout")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    n = args.batch_size
    ppo = PPO()
    for update in range(args.steps):
        obs = torch.randint(256, (n, 4, 84, 84), dtype=torch.uint8)
        actions, logprobs = torch.randint(6, (n,)), torch.full((n,), -1.79)
        print(update, ppo.step(obs, actions, logprobs, torch.randn(n), torch.randn(n)))
