"""EngineCore, which plans and settles, and the client that runs it in this process."""
