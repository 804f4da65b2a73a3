"""Several VMs of one process at once: a group with a thread for each, and collectives between
them, which are host functions of every member and so part of programs."""
