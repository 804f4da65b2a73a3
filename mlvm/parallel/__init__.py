"""Groups of VMs in threads, processes, MPI or Ray, and collectives between their members."""
