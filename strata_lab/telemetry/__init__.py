"""What the machine is, what a step has to move, and how far from the limit the engine runs."""
