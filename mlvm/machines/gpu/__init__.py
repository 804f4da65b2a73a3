"""VM whose tensors are on a GPU, or on any device with OpenCL; see `vm`."""
