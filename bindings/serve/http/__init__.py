"""The server's outside: addresses, connections, routes, and access."""
