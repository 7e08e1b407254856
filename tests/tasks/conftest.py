from tests.tiny import quick_compiler, shared_trainers, text, xla_cache  # noqa: F401  (fixtures of every test here)
