from tests.stages.conftest import engine, parts

__all__ = ["engine", "parts"]
