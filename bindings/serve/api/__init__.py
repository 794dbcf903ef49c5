"""The APIs of the server, one file each: how requests are read, and the form of replies."""
