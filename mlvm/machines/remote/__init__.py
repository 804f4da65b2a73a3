"""VMs on the other side of a socket: the server that lends them, and the client that uses them."""
