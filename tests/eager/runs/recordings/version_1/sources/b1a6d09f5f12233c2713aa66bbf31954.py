import mlvm.eager as ml

ml.random.seed(0)
w = ml.random.normal((3, 2))


@ml.capture
def step(x, factor):
    global w
    noise = ml.random.normal(2)
    scores = x @ w
    w -= factor * ml.mean(x) * scores[0] + noise
    return {"loss": ml.mean(scores * scores), "scores": scores}


@ml.runs.step
def evaluate(x):
    return float(ml.sum(x @ w))


with ml.runs.record("version_1", every=4):
    for i in range(3):
        step(ml.full((4, 3), i + 0.5), 0.5 + i)
        evaluate(ml.ones((1, 3)))
