from compat_support import group_of, world_of_one  # noqa: F401 - fixtures
