"""Groups of VMs, in threads, processes or under MPI, and the collectives between them."""
