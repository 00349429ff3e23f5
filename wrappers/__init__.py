"""Gymnasium wrappers for text environments."""

if __name__ != "prorl_env.wrappers":
    raise ImportError("import prorl_env.wrappers, not wrappers")
