"""Configuration: settings of the service, the checks of their values, and readers of YAML files."""

from token2wav.config.settings import (
    MOST_REPEATS,
    MOST_SILENCE_S,
    PLAYER_BUFFER_SECONDS,
    LimitConfig,
    RuntimeConfig,
    ServerConfig,
    StreamConfig,
    config_hash,
    load_server_config,
)

__all__ = [
    "MOST_REPEATS",
    "MOST_SILENCE_S",
    "PLAYER_BUFFER_SECONDS",
    "LimitConfig",
    "RuntimeConfig",
    "ServerConfig",
    "StreamConfig",
    "config_hash",
    "load_server_config",
]
