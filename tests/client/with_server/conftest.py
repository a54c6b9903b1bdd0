from testkit.rigs.door_fixtures import _servers_are_empty, limited, rig, voice

__all__ = ["_servers_are_empty", "limited", "rig", "voice"]
