"""Configuration: settings of the service, the checks of their values, and readers of YAML files."""

from token2wav.config.settings import (
    PLAYER_BUFFER_SECONDS,
    LimitConfig,
    RuntimeConfig,
    ServerConfig,
    StreamConfig,
    config_hash,
    load_server_config,
)

__all__ = [
    "PLAYER_BUFFER_SECONDS",
    "LimitConfig",
    "RuntimeConfig",
    "ServerConfig",
    "StreamConfig",
    "config_hash",
    "load_server_config",
]
