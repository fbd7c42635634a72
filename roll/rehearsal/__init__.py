"""``roll rehearse``: memory, FLOPs and traffic of a recipe at its full size, without weights and without devices."""
