"""Arenas: named memory for tensors that are freed together."""

from mlvm.arena.arena import Allocation as Allocation
from mlvm.arena.arena import Arena as Arena
