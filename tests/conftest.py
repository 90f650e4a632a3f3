from tests.outcomes import pytest_configure

__all__ = ["pytest_configure"]
