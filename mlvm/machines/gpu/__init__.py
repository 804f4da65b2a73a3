"""A VM whose tensors lie on a GPU, or on any device that speaks OpenCL; see `vm`."""
