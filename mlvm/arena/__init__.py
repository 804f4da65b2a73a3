"""Memory under a name: arenas for tensors that live and end together."""

from mlvm.arena.arena import Allocation as Allocation
from mlvm.arena.arena import Arena as Arena
