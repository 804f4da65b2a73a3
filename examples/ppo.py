"""Proximal policy optimization learns to balance a pole on a cart.

Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347, with advantages of
Schulman et al., arXiv 1506.02438. The environment is numpy: the cart and pole of Barto, Sutton and
Anderson, Neuronlike Adaptive Elements That Can Solve Difficult Learning Control Problems, 1983.
Acting is one program, learning from a batch another.

    python examples/ppo.py
"""

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn

GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01


class CartPoles:
    """n carts side by side: x, its velocity, the pole's angle, its velocity; f32[n, 4]."""

    def __init__(self, n, rng):
        self.rng = rng
        self.state = rng.uniform(-0.05, 0.05, (n, 4))
        self.ages = np.zeros(n, int)

    def step(self, actions):
        """Push left (0) or right (1) for 0.02 s. The new states, who fell, and when."""
        _, v, angle, w = self.state.T
        push = (np.where(actions == 1, 10, -10) + 0.05 * w**2 * np.sin(angle)) / 1.1
        inertia = 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)  # a pole of 0.1 kg, 1.1 kg in all
        turn = (9.8 * np.sin(angle) - np.cos(angle) * push) / inertia
        pull = push - 0.05 * turn * np.cos(angle) / 1.1
        self.state += 0.02 * np.stack([v, pull, w, turn], axis=1)
        self.ages += 1
        done = (abs(self.state[:, [0, 2]]) > (2.4, 0.2095)).any(axis=1) | (self.ages >= 500)
        ages = self.ages[done]
        self.state[done] = self.rng.uniform(-0.05, 0.05, (len(ages), 4))
        self.ages[done] = 0
        return self.state.astype(np.float32), done, ages


def net(outputs, gain, width=64):
    last = nn.Linear(width, outputs, kernel_init=nn.init.orthogonal(gain=gain))
    return nn.Sequential(nn.Linear(4, width), ml.tanh, nn.Linear(width, width), ml.tanh, last)


class Agent(nn.Module):
    """States f[batch, 4] -> logits f[batch, 2] of actions, and the states' values f[batch]."""

    def __init__(self):
        self.policy, self.value = net(2, 0.01), net(1, 1.0)

    def __call__(self, states):
        return self.policy(states), self.value(states)[:, 0]


def chosen(logits, actions):
    """Return the logarithms of the probabilities of those actions."""
    return ml.take_along_axis(ml.log_softmax(logits), actions[:, None], axis=1)[:, 0]


def loss_of(agent, states, actions, before, advantages, returns):
    logits, values = agent(states)
    ratio = ml.exp(chosen(logits, actions) - before)
    clipped = ml.clip(ratio, 1 - CLIP, 1 + CLIP)
    policy = -ml.mean(ml.minimum(ratio * advantages, clipped * advantages))
    entropy = -ml.mean(ml.sum(ml.softmax(logits) * ml.log_softmax(logits), axis=1))
    return policy + 0.5 * ml.mean_squared_error(values, returns) - ENTROPY * entropy


def advantages_of(values, value, done):
    """Return generalized advantage estimates f[steps, carts]; each step's reward is 1."""
    advantages, following = np.zeros_like(values), 0
    for t in reversed(range(len(values))):
        surprise = 1 + GAMMA * value * ~done[t] - values[t]
        advantages[t] = following = surprise + GAMMA * LAMBDA * following * ~done[t]
        value = values[t]
    return advantages


def main(rounds=30, carts=16, steps=128, epochs=4):
    ml.random.seed(0)
    rng = np.random.default_rng(0)
    agent = Agent()
    optimizer = ml.optim.Adam(agent, 2.5e-3)
    poles = CartPoles(carts, rng)

    @ml.capture
    def act(states):
        logits, values = agent(states)
        actions = ml.random.categorical(logits)
        return actions, chosen(logits, actions), values

    @ml.capture
    def learn(*batch):
        loss, gradients = ml.value_and_grad(loss_of)(agent, *batch)
        optimizer.update(ml.optim.clip_by_global_norm(gradients, 0.5))
        return loss

    mean_lengths, state = [], poles.state.astype(np.float32)
    for round in range(rounds):
        records, lengths = [], []
        for _ in range(steps):
            actions, before, values = (x.numpy() for x in act(state))
            after, done, ended = poles.step(actions)
            records.append((state, actions, before, values, done))
            lengths += [*ended]
            state = after
        states, actions, before, values, done = map(np.stack, zip(*records, strict=True))
        advantages = advantages_of(values, act(state)[2].numpy(), done)
        normal = (advantages - advantages.mean()) / advantages.std()
        data = [states, actions, before, normal, advantages + values]
        data = [x.reshape(carts * steps, *x.shape[2:]) for x in data]
        for _ in range(epochs):
            for rows in rng.permutation(carts * steps).reshape(8, -1):
                learn(*(x[rows] for x in data))
        mean_lengths.append(np.mean(lengths or [np.nan]))
        if round % 5 == 4:
            print(
                f"round {round + 1:2}: a pole stands for {mean_lengths[-1]:.0f} steps, 500 at most"
            )
    return mean_lengths


if __name__ == "__main__":
    main()
