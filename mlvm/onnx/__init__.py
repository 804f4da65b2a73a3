"""ONNX: load files as Modules, and write captured functions as files."""

from mlvm.onnx.model import Model, load
from mlvm.onnx.writing import save

__all__ = ["Model", "load", "save"]
