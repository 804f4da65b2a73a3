"""Activations at the edges of their domains; their values and gradients are rows of a table."""

from __future__ import annotations
