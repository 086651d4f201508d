"""What live views of the fleet show: made when somebody looks, from what is kept anyway."""
