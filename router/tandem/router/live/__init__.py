"""Live views of the fleet: made on request, from state that is recorded anyway."""
