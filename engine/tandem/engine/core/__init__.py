"""EngineCore, which plans and updates, and the client that runs it in this process."""
