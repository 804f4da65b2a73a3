"""Training on a Ray cluster that loses a host: its actors resume from a checkpoint.

The cluster is on this computer (`ray.cluster_utils`): four actors on two nodes, and a spare one. In
the middle of the training one of the two is killed with its actors. The group starts all actors
again, and repeats the task, which loads its last checkpoint. The weights are those of four threads,
bit for bit.

    pip install "mlvm[ray]"
    python examples/ray_cluster.py
"""

import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np

import mlvm.eager as ml


def train(folder, steps, pause, rank, vm):
    """Train on this member's rows from the last checkpoint, and return the weights."""
    from mlvm.eager import nn  # in here, since a script's functions go to actors by value

    @ml.parallel.value_and_grad
    def loss_and_gradients(model, x, y):
        return ml.mean(ml.square(model(x) - y))

    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8), np.float32)
    y = x @ rng.standard_normal((8, 1), np.float32)
    mine = slice(rank, None, ml.parallel.size())
    weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    with weights.allocating():
        model = nn.Linear(8, 1, key=ml.random.key(0))
        optimizer = ml.optim.SGD(model, 0.05)
    file = Path(folder) / "checkpoint.npz"
    start = 0
    if file.exists():
        saved = np.load(file)
        start = int(saved["step"])
        model.load_state({name: saved[name] for name in model.state()})
    for step in range(start, steps):
        with batch:
            _, gradients = loss_and_gradients(model, ml.asarray(x[mine]), ml.asarray(y[mine]))
            optimizer.update(gradients)
        ml.parallel.barrier()  # all members have done the step
        if rank == 0:
            state = {name: np.asarray(value) for name, value in model.state().items()}
            np.savez(file.with_suffix(".new.npz"), step=step + 1, **state)
            file.with_suffix(".new.npz").replace(file)
        ml.parallel.barrier()
        time.sleep(pause)
    return {name: np.asarray(value) for name, value in model.state().items()}


def main(steps=20):
    """Train on the cluster and on threads, and return the weights of both."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = {node.node_id: node for node in [cluster.add_node(num_cpus=2) for _ in range(3)]}
    ray.init(address=cluster.address)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            ml.parallel.RayGroup(4, timeout=60, restarts=2) as group,
        ):
            task = partial(train, folder, steps, 0.2)

            used = group.run(lambda rank, vm: ray.get_runtime_context().get_node_id())

            def lose_a_node():
                while not (Path(folder) / "checkpoint.npz").exists():
                    time.sleep(0.1)
                cluster.remove_node(nodes[used[-1]], allow_graceful=False)

            loss = threading.Thread(target=lose_a_node)
            loss.start()
            there = group.run(task)[0]
            loss.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    with tempfile.TemporaryDirectory() as folder, ml.parallel.Group(4) as threads:
        here = threads.run(partial(train, folder, steps, 0))[0]
    same = all(there[name].tobytes() == here[name].tobytes() for name in here)
    print("the bits of threads" if same else "other bits than those of threads")
    return there, here


if __name__ == "__main__":
    main()
