from tests.stages.conftest import parts

__all__ = ["parts"]
