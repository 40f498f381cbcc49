"""Real gloo processes: DCP, meshes, the end of an epoch, ranks that die."""
