"""Models of other frameworks: ONNX files become Modules, and captured functions ONNX files."""
