"""The server as it is seen from outside: addresses, connections, routes, and who may ask what."""
