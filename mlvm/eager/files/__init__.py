"""Reading and writing of tensors in files."""
