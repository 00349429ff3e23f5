"""Sandboxes behind a ZeroMQ node server: the contract, the client, the server and the runtimes."""

if __name__ != "prorl_env.remote":
    raise ImportError("import prorl_env.remote, not remote")
