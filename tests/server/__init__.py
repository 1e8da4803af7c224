import pytest

# Its assertions hold under ``python -O`` too.
pytest.register_assert_rewrite("tests.server.http_support")
