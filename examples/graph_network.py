"""A graph network finds out who sides with whom in a karate club, told of two members only.

Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks, arXiv
1609.02907: a member's next features are a weighted sum of those of its friends, `ml.segment_sum`
over the friendships. The club is that of Zachary, An Information Flow Model for Conflict and
Fission in Small Groups, 1977: 34 members, 78 friendships, and a quarrel between teacher and
president that parted them.

    python examples/graph_network.py
"""

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn

FRIENDS = """
2-1 3-1 3-2 4-1 4-2 4-3 5-1 6-1 7-1 7-5 7-6 8-1 8-2 8-3 8-4 9-1 9-3 10-3 11-1 11-5 11-6 12-1 13-1
13-4 14-1 14-2 14-3 14-4 17-6 17-7 18-1 18-2 20-1 20-2 22-1 22-2 26-24 26-25 28-3 28-24 28-25 29-3
30-24 30-27 31-2 31-9 32-1 32-25 32-26 32-29 33-3 33-9 33-15 33-16 33-19 33-21 33-23 33-24 33-30
33-31 33-32 34-9 34-10 34-14 34-15 34-16 34-19 34-20 34-21 34-23 34-24 34-27 34-28 34-29 34-30 34-31
34-32 34-33"""
WITH_THE_TEACHER = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 17, 18, 20, 22]


class GraphConvolution(nn.Module):
    """f[members, inputs] -> f[members, outputs]: D^-1/2 A D^-1/2 x W, A with the friendships."""

    def __init__(self, inputs, outputs):
        self.linear = nn.Linear(inputs, outputs)

    def __call__(self, x, sender, receiver):
        n = len(x)
        degree = ml.segment_sum(ml.ones(len(sender)), receiver, n)
        weight = ml.rsqrt(degree[sender] * degree[receiver])
        messages = self.linear(x)[sender] * weight[:, None]
        return ml.segment_sum(messages, receiver, n)


class GCN(nn.Module):
    """Logits f[members, 2] of the sides that members take."""

    def __init__(self, members, hidden=16):
        self.members = nn.buffer(ml.eye(members))  # nothing is labels of them
        self.layers = [GraphConvolution(members, hidden), GraphConvolution(hidden, 2)]

    def __call__(self, sender, receiver):
        x = ml.relu(self.layers[0](self.members, sender, receiver))
        return self.layers[1](x, sender, receiver)


def main(steps=200):
    ml.random.seed(0)
    friends = np.array([pair.split("-") for pair in FRIENDS.split()], int) - 1
    members = friends.max() + 1
    themselves = np.arange(members)[:, None].repeat(2, axis=1)
    sender, receiver = np.concatenate([friends, friends[:, ::-1], themselves]).T
    sides = np.ones(members, int)
    sides[np.array(WITH_THE_TEACHER) - 1] = 0
    labels = np.full(members, -1)
    labels[[0, members - 1]] = 0, 1  # the teacher and the president

    def loss_of(model, sender, receiver):
        logits = model(sender, receiver)
        loss = ml.softmax_cross_entropy(logits, labels, ignore_index=-1, reduction="mean")
        return loss, ml.argmax(logits, axis=1)

    model = GCN(members)
    optimizer = ml.optim.AdamW(model, 1e-2, weight_decay=1e-2)

    @ml.capture
    def train_step(sender, receiver):
        (loss, guess), gradients = ml.value_and_grad(loss_of, has_aux=True)(model, sender, receiver)
        optimizer.update(gradients)
        return loss, guess

    for step in range(steps):
        loss, guess = train_step(sender, receiver)
        if step % 50 == 0 or step == steps - 1:
            right = int(ml.sum(guess == sides))
            print(f"step {step:3}: loss {float(loss):.3f}, {right} of {members} sides are right")
    return right / members


if __name__ == "__main__":
    main()
