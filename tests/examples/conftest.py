from testkit.models.front_end import demo_prompt, front_end

__all__ = ["demo_prompt", "front_end"]
