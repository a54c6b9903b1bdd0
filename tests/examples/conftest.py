from testkit.models.front_end import demo_prompt, front_end
from testkit.rigs.door_fixtures import _servers_are_empty, rig

__all__ = ["_servers_are_empty", "demo_prompt", "front_end", "rig"]
