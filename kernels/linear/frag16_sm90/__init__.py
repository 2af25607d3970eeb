"""Weight-only linear in CUDA C++ for Hopper over frag16 tiles: one table of instances (instances.json), three schedules."""
