"""The worker's process: EngineCore, which plans and settles, and the shell of sockets around it."""
