"""The `tandem` command: composes the other portions and holds no logic of its own."""
