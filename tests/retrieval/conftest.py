from tests.tiny import quick_compiler, xla_cache  # noqa: F401  (fixtures of every test here)
