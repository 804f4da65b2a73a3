"""Other VMs behind the same protocol, and functions in C."""
