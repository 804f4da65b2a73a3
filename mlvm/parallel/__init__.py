"""Groups of VMs in one process, a thread for each VM, and the collectives between them."""
