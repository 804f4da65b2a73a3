"""A GPT that learns to write this repository's documentation, letter by letter.

Radford et al., Language Models are Unsupervised Multitask Learners, 2019, with rotary positions
(Su et al., arXiv 2104.09864) and two heads of queries for each of keys and values (Ainslie et al.,
arXiv 2305.13245). A training step is one program for pieces of text of all lengths. So is writing:
each letter is made from the one before and a cache of keys and values.

    python examples/gpt.py
"""

from pathlib import Path

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn

LENGTH = 128  # the most letters that training sees at a time


class GPT(nn.Module):
    """Letters i64[batch, time] -> logits f32[batch, time, letters] of those that follow."""

    def __init__(self, num_letters, width=64, num_layers=2, num_heads=4):
        options = {"num_kv_heads": num_heads // 2, "rotary_base": 10000.0, "pre_norm": True}
        self.letters = nn.Embedding(num_letters, width)
        self.layers = [
            nn.TransformerEncoderLayer(width, num_heads, activation=ml.gelu, **options)
            for _ in range(num_layers)
        ]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_letters)

    def __call__(self, letters):
        x = self.letters(letters)
        for layer in self.layers:
            x = layer(x, is_causal=True)
        return self.head(self.norm(x))

    def init_cache(self, batch, max_length):
        return [layer.init_cache(batch, max_length) for layer in self.layers]

    def step(self, letters, cache, position):
        """Return logits for letters i64[batch, 1] at that position, and the updated cache."""
        x, after = self.letters(letters), []
        for layer, entry in zip(self.layers, cache, strict=True):
            x, entry = layer(x, cache=entry, position=position)
            after.append(entry)
        return self.head(self.norm(x)), after


def loss_of(model, letters):
    return ml.softmax_cross_entropy(model(letters[:, :-1]), letters[:, 1:], reduction="mean")


def train(model, text, steps, rng):
    """Train on pieces of the text i64[letters] of random lengths, and return the losses."""
    schedule = ml.optim.cosine(1e-2, total_steps=steps, warmup_steps=steps // 10)
    optimizer = ml.optim.AdamW(model, schedule, weight_decay=0.1)

    @ml.capture(dynamic_axes={"letters": (None, "time")}, max_sizes={"time": LENGTH + 1})
    def train_step(letters):
        loss, gradients = ml.value_and_grad(loss_of)(model, letters)
        optimizer.update(ml.optim.clip_by_global_norm(gradients, 1.0))
        return loss

    losses = []
    for _ in range(steps):
        length = rng.integers(LENGTH // 2, LENGTH + 1)
        starts = rng.integers(0, len(text) - length, size=(8, 1))
        losses.append(float(train_step(text[starts + np.arange(length + 1)])))
    assert train_step.signatures == 1
    return losses


def write(model, prompt, length, temperature=0.7):
    """Return the prompt i64[letters] and what follows it, i64[length] together."""

    @ml.capture
    def written(letters):
        def turn(i, state):
            letters, cache = state
            logits, cache = model.step(letters[i][None, None], cache, i)
            drawn = ml.random.categorical(logits[0, 0] / temperature)
            letter = ml.where(i + 1 < len(prompt), letters[i + 1], drawn)
            return ml.dynamic_update(letters, letter, i + 1), cache

        return ml.fori_loop(0, length - 1, turn, (letters, model.init_cache(1, length)))[0]

    return written(np.pad(prompt, (0, length - len(prompt))))


def main(steps=600, length=LENGTH):
    ml.random.seed(0)
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    letters, text = np.unique(
        [*"".join(page.read_text("utf-8") for page in pages)], return_inverse=True
    )
    model = GPT(len(letters))
    losses = train(model, text, steps, np.random.default_rng(0))
    print(f"{len(text):,} letters, {len(letters)} of them different")
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; without a guess {np.log(len(letters)):.2f}")
    prompt = np.searchsorted(letters, [*"A tensor "])
    print("".join(letters[write(model, prompt, length).numpy()]))
    return model, losses


if __name__ == "__main__":
    main()
