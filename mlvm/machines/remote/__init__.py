"""Server and client of VMs that are used over a socket."""
