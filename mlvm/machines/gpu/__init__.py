"""VM for a GPU, or for any device with OpenCL; see `vm`."""
