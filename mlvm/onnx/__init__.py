"""Models of other frameworks: ONNX files become Modules, and captured functions ONNX files."""

from mlvm.onnx.model import Model, load
from mlvm.onnx.writing import save

__all__ = ["Model", "load", "save"]
