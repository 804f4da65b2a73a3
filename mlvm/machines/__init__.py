"""Other VMs with the same protocol, and functions in C."""
