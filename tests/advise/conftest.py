from tests.tiny import text  # noqa: F401  (fixture of every test here)
