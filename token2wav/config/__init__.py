"""Configuration of the service, and what reads YAML: settings, their values, and model files."""

from token2wav.config.settings import (
    LimitConfig,
    RuntimeConfig,
    ServerConfig,
    StreamConfig,
    config_hash,
    load_server_config,
)

__all__ = ["LimitConfig", "RuntimeConfig", "ServerConfig", "StreamConfig", "config_hash", "load_server_config"]
