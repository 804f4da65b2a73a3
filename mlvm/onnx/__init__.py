"""Models of other frameworks: ONNX files become Modules, and captured functions ONNX files."""

from mlvm.onnx.model import Model, load

__all__ = ["Model", "load"]
