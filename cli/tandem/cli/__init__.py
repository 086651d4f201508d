"""The `tandem` command, composed of the other packages."""
