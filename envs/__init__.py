"""Gymnasium environments, tasks, tools and graders."""

if __name__ != "prorl_env.envs":
    raise ImportError("import prorl_env.envs, not envs")
